"""Roll the shipped causal model out with every policy, and judge the films slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.metrics.bootstrap import mean_interval
from diffcache.eval.metrics.intervals import share_interval
from diffcache.eval.record import Progress
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.video.rows import Change, Row
from diffcache.eval.workshop.video.shapes import by_slice, judge, switch_latency
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.pipelines.small.causal import CALL, ShapesCausal
from diffcache.pipelines.small.causal_scenes import (
    CHUNK,
    COLORS,
    HELD_OUT,
    SHAPES,
    Clips,
    draw,
    prompt,
)
from diffcache.video import VideoPolicy

GIVEN = CHUNK  # first frames that are given: they alone tell what no prompt states
SLICE = 24  # frames that a training film has
GROUP = 16  # films that are made at once
SHARES = ("identity", "mark", "static")
BEFORE, AFTER = 24, 48  # frames on each side of a change of the prompt


class Rollouts:
    """Held-out films, begun and rolled out with the same noise for every policy.

    Args:
        model: The shipped model, on its device.
        samples: Number of films.
        seed: Seed of the films, which no training reached, and of the noise.

    Attributes:
        groups: True clips of the films, `GROUP` or fewer at once.
    """

    def __init__(self, model: ShapesCausal, samples: int, seed: int = 0) -> None:
        self.model, self.seed = model, seed
        generator = torch.Generator().manual_seed(HELD_OUT + seed)
        sizes = [min(GROUP, samples - start) for start in range(0, samples, GROUP)]
        self.groups = [draw(size, GIVEN, generator) for size in sizes]

    def begin(self, video: CausalVideo, policy: VideoPolicy, group: int) -> Session:
        """Return a stream that was given the first frames of a group's films."""
        truth = self.groups[group]
        text = self.model.embed([words[0] for words in truth.prompts])
        session = video.session(text, policy=policy, seed=self.seed + group, **CALL)
        session.take(truth.film().to(text))
        return session

    def film(self, video: CausalVideo, policy: VideoPolicy, group: int, frames: int) -> Tensor:
        """Return films of a group, `[B, 3, frames, 24, 24]` in -1..1, on the CPU."""
        session = self.begin(video, policy, group)
        made = [session.next().cpu() for _ in range(-(-(frames - GIVEN) // CHUNK))]
        first = self.groups[group].film()
        return torch.cat([first, *made], 2)[:, :, :frames].clamp(-1, 1)

    def table(
        self, rows: Sequence[Row], frames: int, kept: Parts, progress: Progress | None
    ) -> dict[str, Any]:
        """Return what every row's films kept, by slices: `slices` and `late` by name.

        Args:
            rows: Policies.
            frames: Frames of a film.
            kept: Rows that were made before.
            progress: Callback for the progress, given (rows done, rows in all, name of the next).
        """
        found: dict[str, Any] = {}
        with self.model.video() as video:
            for number, row in enumerate(rows):
                if progress is not None:
                    progress(number, len(rows), row.name)
                make = partial(self._row, video, row.policy, frames)
                found[row.name] = kept.take(f"films: {row.name}", make)
        return found

    def _row(self, video: CausalVideo, policy: VideoPolicy, frames: int) -> dict[str, Any]:
        parts = []
        for group, truth in enumerate(self.groups):
            films = self.film(video, policy, group, frames)
            parts.append(by_slice(judge(films, truth.lasting(frames)), SLICE))
        return summary(parts)

    def change(self, video: CausalVideo, row: Change, group: int) -> tuple[Tensor, Clips]:
        """Return films whose prompt changes, and what they are to show.

        The films of a group have prompts of their own; each changes to the next shape and to the
        color that lies two further on.
        """
        truth = self.groups[group].lasting(BEFORE + AFTER)
        shapes, colors = truth.shapes.clone(), truth.colors.clone()
        shapes[:, BEFORE:] = (shapes[:, BEFORE:] + 1) % len(SHAPES)
        colors[:, BEFORE:] = (colors[:, BEFORE:] + 2) % len(COLORS)
        session = self.begin(video, row.policy, group)
        made = [session.next() for _ in range((BEFORE - GIVEN) // CHUNK)]
        pairs = zip(shapes[:, -1].tolist(), colors[:, -1].tolist(), strict=True)
        session.switch(self.model.embed([prompt(*pair) for pair in pairs]), row.mode)
        made += [session.next() for _ in range(AFTER // CHUNK)]
        films = torch.cat([self.groups[group].film(), *(x.cpu() for x in made)], 2)
        return films.clamp(-1, 1), replace(truth, shapes=shapes, colors=colors)

    def changes(
        self, rows: Sequence[Change], kept: Parts, progress: Progress | None
    ) -> list[dict[str, Any]]:
        """Return how soon each way to change the prompt shows, and what it carries over.

        Args:
            rows: Ways.
            kept: Ways that were filmed before.
            progress: Callback for the progress, given (rows done, rows in all, name of the next).
        """
        found = []
        with self.model.video() as video:
            for number, row in enumerate(rows):
                if progress is not None:
                    progress(number, len(rows), row.name)
                told = kept.take(f"change: {row.name}", partial(self._changed, video, row))
                found.append({"name": row.name, **told})
        return found

    def _changed(self, video: CausalVideo, row: Change) -> dict[str, Any]:
        late, parts = [], []
        for group in range(len(self.groups)):
            films, truth = self.change(video, row, group)
            late.append(
                switch_latency(films[:, :, BEFORE:], truth.shapes[:, -1], truth.colors[:, -1])
            )
            judged = judge(films, truth)
            parts.append({key: value[:, BEFORE:].nanmean(1) for key, value in judged.items()})
        chunks = torch.cat(late)
        after = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return {
            "shown": share_interval(chunks.isfinite()).to_dict(),
            "chunks": _median(chunks[chunks.isfinite()]),
            "identity": share_interval(after["identity"]).to_dict(),
            "mark": share_interval(after["mark"]).to_dict(),
            "wall_db": mean_interval(after["wall_db"]).to_dict(),
        }


def summary(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return means of every slice, and of the last quarter of the film with an interval.

    Args:
        parts: Results of `by_slice`, group by group.
    """
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    quarter = -(-next(iter(whole.values())).shape[1] // 4)
    slices, late = {}, {}
    for key, values in whole.items():
        middle = torch.nanmedian if key == "jump" else torch.nanmean  # a still film's has no bound
        slices[key] = [float(middle(column)) for column in values.unbind(1)]
        if key != "jump":
            interval: Callable[..., Any] = share_interval if key in SHARES else mean_interval
            late[key] = interval(values[:, -quarter:].nanmean(1)).to_dict()
    return {"slices": slices, "late": late}


def _median(values: Tensor) -> float | None:
    return float(values.median()) if len(values) else None

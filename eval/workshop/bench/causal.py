"""Caches of causal video on the shipped model: what films keep, and time and bytes of a chunk.

Films are made by all policies from the same sentences and the same noise. Chunks are timed one
by one, all policies in turn in one process, beside one call of the transformer without history,
whose work never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.cost.interleave import Call, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.bench.runner import by_thirds
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.small.sticker_causal import CHUNK
from diffcache.eval.workshop.video.rollouts import DIRECTORY, EVERY, SIZE, Rollouts, held_sentences
from diffcache.eval.workshop.video.rows import ROWS, Row
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.video import FullHistory, Window

SAMPLES, LENGTH = 32, 80  # films and their chunks, 479 frames
CHUNKS = 96  # that are timed
ALONE, BATCHED, SEQUENTIAL = "no history", "stream batch", "level by level"
DEPTHS = (8, 32, 64, 128)  # chunks of history that are computed anew


def measure(
    setting: Setting,
    *,
    rounds: int = CHUNKS,
    samples: int = SAMPLES,
    length: int = LENGTH,
    rows: Sequence[Row] = ROWS,
    unfinished: Path | None = None,
) -> dict[str, Any]:
    """Measure films and chunks.

    `rounds` is the number of timed chunks of every policy, at least 3; `samples` that of films that are judged, at
    least 2, each of `length` chunks. The stock policy is the first row.
    """
    if rounds < 3 or samples < 2:
        raise ValueError(f"rounds={rounds}, samples={samples}: must be at least 3 and 2")
    rollouts = Rollouts(held_sentences(samples), setting)
    about = {"samples": samples, "length": length, "dtype": str(setting.dtype)}
    kept = Parts(unfinished, about | {"model": directory_sha256(DIRECTORY)})
    found = rollouts.table(rows, length, kept, setting.progress)
    text = rollouts.text[:1]
    with rollouts.video() as video:
        chunks = chunk_times(video, text, rows, rounds, setting)
        return {
            "shapes": dict(model="sticker-causal", samples=samples, length=length, chunk=CHUNK, every=EVERY),
            "rounds": rounds,
            "rows": [
                {"name": row.name, "role": row.role, **found[row.name], "chunk": chunks[row.name]} for row in rows
            ],
            "anew": anew(video, text, [depth for depth in DEPTHS if depth < rounds], setting),
            "stream_batch": stream_batch(video, text, min(rounds, 40), setting),
            "parts": kept.end(),
        }


def chunk_times(
    video: CausalVideo, text: Tensor, rows: Sequence[Row], rounds: int, setting: Setting
) -> dict[str, dict[str, Any]]:
    """Return time and bytes of a chunk by thirds of a long film, by row; rows take turns."""
    sessions = {row.name: video.session(text, policy=row.policy, size=SIZE) for row in rows}
    steps: dict[str, Call | Turn] = {ALONE: lambda: video.session(text, recall=0, size=SIZE).next()}
    steps |= {name: session.next for name, session in sessions.items()}
    held = {name: lambda session=session: session.store.nbytes for name, session in sessions.items()}
    return by_thirds(steps, held, rounds, setting)


def _clock(steps: Mapping[str, Call | Turn], rounds: int, setting: Setting) -> dict[str, list[float]]:
    return take_turns(steps, rounds, 0, setting).own(setting)


def anew(video: CausalVideo, text: Tensor, depths: Sequence[int], setting: Setting) -> list[dict[str, Any]]:
    """Return the time of a chunk whose history is computed anew, against cached histories.

    `depths` are chunks of history. One clean pass over the history is counted for a chunk; without any cache there
    would be one in every step.
    """
    found = []
    channels = video.transformer.config.in_channels
    for depth in depths:
        film = torch.zeros(1, channels, depth * CHUNK, *SIZE).to(text)

        def begin(policy: Any, film: Tensor = film) -> Any:
            session = video.session(text, policy=policy, recall=0, size=SIZE)
            session.take(film)
            return session

        full, window = begin(FullHistory()), begin(Window(12, 3))
        steps: dict[str, Call | Turn] = {
            "anew": lambda begin=begin: begin(FullHistory()).next(),  # type: ignore[misc]
            "cached": full.next,
            "window": window.next,
        }
        clock = _clock(steps, 3, setting)
        found.append(
            {"chunks": depth}
            | {
                f"of_{name}": summary([a / b for a, b in zip(clock["anew"], clock[name], strict=True)])
                for name in ("cached", "window")
            }
        )
    return found


def stream_batch(video: CausalVideo, text: Tensor, rounds: int, setting: Setting) -> dict[str, Any]:
    """Return the speed of all noise levels in one batch relative to one after the other."""
    levels = len(video.sampler.levels)
    streams = {
        name: StreamBatch(video, text, policy=Window(12, 3), rows=rows, size=SIZE)
        for name, rows in ((SEQUENTIAL, 1), (BATCHED, levels))
    }
    films: dict[str, list[Tensor]] = {name: [] for name in streams}

    def step(name: str) -> None:
        chunk = streams[name].next()
        if chunk is not None:
            films[name].append(chunk)

    clock = _clock({name: partial(step, name) for name in streams}, rounds + levels, setting)
    films[BATCHED] += streams[BATCHED].finish()
    pairs = zip(clock[SEQUENTIAL][levels:], clock[BATCHED][levels:], strict=True)
    error = max(float((one - other).abs().max()) for one, other in zip(films[SEQUENTIAL], films[BATCHED], strict=True))
    return {"levels": levels, "faster": summary([one / other for one, other in pairs]), "largest_difference": error}

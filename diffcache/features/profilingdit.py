"""Reuse the runs of blocks that look away from the foreground (ProfilingDiT)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from diffcache.features.base import Spacing, When, check_int
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.decreasing import Decreasing
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every, Table, steps_of
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.ranges import Count, Share, Whole
from diffcache.step import Site, Step

OVERLAP = "overlap."  # with the name of a list of blocks: the name of its table
Foreground = Tensor | Callable[[Step, Tensor], Tensor]
_NAME = re.compile(r"(.+)\.(\d+)(?:-(\d+))?")
_HUNYUAN_STEPS = (6, 18, 26, 32, 38, 42, 46, 48)
_WAN_RUNS = ("0", "2-7", "10-20", "25-32", "37-38")
_HUNYUAN_SINGLE = ("0", "2", "4-7", "10-21", "23", "25-27", "31", "33")
PUBLISHED: dict[str, dict[str, Any]] = {
    # 28 of 40 blocks, any number of steps
    "wan2.1-14b": {"background": tuple(f"blocks.{run}" for run in _WAN_RUNS)},
    # 14 of 20 double and 24 of 40 single blocks, 50 steps
    "hunyuanvideo": {
        "background": ("transformer_blocks.6-19", *(f"single_transformer_blocks.{run}" for run in _HUNYUAN_SINGLE)),
        "listed": (("single_transformer_blocks", _HUNYUAN_STEPS),),
        "total": 50,
    },
}


@dataclass(frozen=True)
class ProfilingDiT(Calibrated):
    """Compute foreground blocks at every step and reuse the residuals of background blocks.

    Reference: Model Reveals What to Cache, arXiv 2504.03140, section 3, with the schedules of its
    official code. Adjacent background blocks are one run, whose outputs less its inputs are kept
    at a computed step and added at the others; for joint attention, in both streams. Unlike the
    official code a run may start at the first block, and nothing is kept from one sampling run to
    the next. The background blocks are given, published, or profiled on the model by
    `diffcache.calibrate`: see `ProfileCollector`, which needs no segmentation model.

    Args:
        background: Blocks to reuse, names or ranges such as `blocks.2-7`; empty turns the cache
            off; None takes those that `tables` tell.
        every: Interval in steps after the warm-up; 1 turns the cache off.
        warmup: First steps that are all computed; so is the step after them with a fixed
            interval, as in the official code.
        interval: `fixed` as in the official code; `decreasing` from `longest` to `shortest` as in
            the paper, see `Decreasing`.
        longest: Interval after the warm-up, in steps. The paper's number is not known to us.
        shortest: Interval at the end, in steps. The paper's number is not known to us.
        listed: Pairs of a list of blocks and its computed steps after the warm-up, in the place
            of the interval; needs `total`.
        total: Number of steps of the run, where it needs to be known and the run does not say.
        share: Part of the profiled blocks that is background, from 0 to 1, those that overlap
            least with the foreground first; None takes those below the median.
        sampled: Profiling looks at every `sampled`-th step.
        text: Place of the text tokens in joint attention, `first` or `last`; None finds out.
        foreground: Foreground for profiling: bool [N] or [B, N] over the image tokens, or a
            function of the step and the denoiser's output that returns it; None finds it in the
            output.
        tables: Measured tables, or their file.
        model: Model that the background blocks were published for, as `published` names it;
            others are refused. Empty for any.

    Raises:
        ValueError: If a block's name is not understood.
        TablesError: If the tables cannot be read, or belong to another method.
    """

    numbers: ClassVar[str] = "background"
    publishes: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED
    collected_by: ClassVar[str] = "diffcache.offline.profilingdit_collect:ProfileCollector"
    schema: ClassVar[Schema] = Schema({OVERLAP + "*": Entry(("blocks",), low=0, high=1, gaps=True)})

    background: tuple[str, ...] | str | None = None
    every: Spacing = 6
    warmup: Whole = 6
    interval: Literal["fixed", "decreasing"] = "fixed"
    longest: int = 8
    shortest: int = 4
    listed: tuple[tuple[str, tuple[int, ...]], ...] | Mapping[str, Any] = ()
    total: Count | None = None
    share: Share | None = None
    sampled: Count = 5
    text: Literal["first", "last"] | None = None
    foreground: Foreground | None = field(default=None, repr=False, compare=False)
    tables: Tables | str | None = None
    model: str = ""

    def check(self) -> None:
        """Raise unless blocks are named, listed steps are those of a run, and tables fit."""
        if isinstance(self.background, str):
            object.__setattr__(self, "background", (self.background,))
        if not isinstance(self.background, (tuple, list, type(None))):
            raise ValueError(f"background={self.background!r}: must be names such as 'blocks.2-9', or None")
        if not (self.foreground is None or isinstance(self.foreground, Tensor) or callable(self.foreground)):
            raise ValueError(
                f"foreground={self.foreground!r}: must be a bool tensor over the image tokens, a "
                "function that returns one, or None to find it in the output"
            )
        object.__setattr__(self, "listed", _pairs(self.listed))
        if self.listed and self.total is None:
            raise ValueError("total=None: listed steps need the number of steps, such as total=50")
        super().check()
        when = self._when()
        if self.background is not None:
            self._combine(merged(self.background), when)

    def parts(self) -> Combine:
        """Return the runs of background blocks, which are given or measured, their schedule, and reuse."""
        blocks = self.background
        if blocks is None:
            blocks = background_of(self.measured(), self.share)
        return self._combine(merged(blocks), self._when())

    def _combine(self, blocks: tuple[str, ...], when: When) -> Combine:
        if not blocks:
            return Combine(Every(1), Reuse(), Site.MODEL)
        own = dict(_pairs(self.listed))
        unknown = [key for key in own if not any(_parsed(name)[0] == key for name in blocks)]
        if unknown:
            raise ValueError(f"listed: {unknown[0]!r} is no list of the background blocks {', '.join(blocks)}")
        if own:
            assert self.total is not None
            common = steps_of(when, self.total)
            first = tuple(range(min(self.warmup, self.total)))
            steps = {b: (*first, *own[k]) if (k := _parsed(b)[0]) in own else common for b in blocks}
            when = Table(steps, self.total)
        return Combine(when, Reuse(), Site.RUN, blocks=blocks)

    def _when(self) -> When:
        if self.interval == "fixed":
            return Every(self.every, self.warmup + 1)
        return Decreasing(self.longest, self.shortest, self.warmup, self.total)


def background_of(tables: Tables, share: float | None) -> tuple[str, ...]:
    """Return the background blocks: those whose attention overlaps least with the foreground.

    Tables have `overlap.<list>`, float [L], 0 to 1, NaN where nothing was measured. `share` is a
    part of the measured blocks, rounded to whole blocks, None for those below the median. Of equal
    blocks the first come first, lists by their names.
    """
    found = [
        (float(value), f"{name.removeprefix(OVERLAP)}.{index}")
        for name in sorted(tables.names())
        if name.startswith(OVERLAP)
        for index, value in enumerate(tables[name])
        if not math.isnan(float(value))
    ]
    if share is None:
        middle = float(torch.tensor([v for v, _ in found], dtype=torch.float64).quantile(0.5))
        return merged(name for value, name in found if value < middle)
    count = math.floor(share * len(found) + 0.5)
    return merged(name for _, name in sorted(found, key=lambda entry: entry[0])[:count])


def merged(names: Iterable[str]) -> tuple[str, ...]:
    """Return block names as ranges, adjacent blocks of a list in one; raise ValueError if a name is not understood."""
    wanted: dict[str, set[int]] = {}
    for name in names:
        key, first, last = _parsed(name)
        wanted.setdefault(key, set()).update(range(first, last + 1))
    ranges: list[str] = []
    for key, indices in wanted.items():
        starts = sorted(index for index in indices if index - 1 not in indices)
        ends = sorted(index for index in indices if index + 1 not in indices)
        for first, last in zip(starts, ends, strict=True):
            ranges.append(f"{key}.{first}" if first == last else f"{key}.{first}-{last}")
    return tuple(ranges)


def _pairs(listed: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return lists of blocks with their computed steps as tuples; raise ValueError if they are none."""
    try:
        pairs = listed.items() if isinstance(listed, Mapping) else listed
        made = tuple((str(key), tuple(steps)) for key, steps in pairs)
    except (TypeError, ValueError):
        raise ValueError(f"listed={listed!r}: must be pairs such as (('blocks', (7, 12, 20)),)") from None
    for _, steps in made:
        for index in steps:
            check_int("listed", index, 0)
    return made


def _parsed(name: str) -> tuple[str, int, int]:
    """Return the list, first and last index of a name such as `blocks.2-7`."""
    match = _NAME.fullmatch(str(name))
    first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
    if match is None or last < first:
        raise ValueError(f"background: {name!r} is no block such as 'blocks.3' or 'blocks.2-9'")
    return match[1], first, last

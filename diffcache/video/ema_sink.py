"""EMA-Sink: first frames that take in the frames that leave the window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from diffcache.kv.merge import Merger
from diffcache.kv.observe import Observation
from diffcache.kv.plan import KEEP
from diffcache.kv.positions import Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.slots import Slots
from diffcache.ranges import Count, Share
from diffcache.video.policy import VideoPolicy
from diffcache.video.window import rolling


@dataclass(frozen=True)
class EMASink(VideoPolicy):
    """Hold the first frames and the latest; frames that go are averaged into the first ones.

    Each frame that leaves the window moves one sink towards it, token by token, keys before
    rotation and values: `sink = alpha sink + (1 - alpha) frame`. Sinks take turns. The average is
    held as keys are: in bfloat16 rounding loses nearly all that the default of `alpha` adds, as it
    does in the released code.

    Departures: `window` does not count the chunk that is made. The released code averages only
    where chunks are as long as the sinks; elsewhere it replaces sinks, which is not done here.
    Until December 2025 it averaged the latest frames instead of those that go (`fuses="latest"`).
    Numbers end at the newest frame instead of beginning at 0, which rotary embedding does not see.

    Args:
        window: Latest frames that are held beside the chunk.
        sinks: First frames.
        alpha: Share that a sink keeps of itself, from 0 to 1.
        fuses: Frames that are averaged: those that are `evicted`, or as many of the `latest`.

    Reference: Reward Forcing, arXiv 2512.04678 (EMA-Sink), and its released code.
    """

    by_head: ClassVar[bool] = True
    window: Count = 6
    sinks: Count = 3
    alpha: Share = 0.999
    fuses: Literal["evicted", "latest"] = "evicted"

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that averages frames into the first ones before it drops them."""
        merge = Average(unit, self.sinks, self.alpha, self.fuses == "latest")
        return rolling(self.name, self.sinks * unit, self.window * unit, Slot(), merge)


@dataclass(frozen=True)
class Average(Merger):
    """Move the first frames towards those that go, frame by frame.

    Args:
        unit: Tokens of a frame.
        sinks: First frames, one of which each frame moves.
        alpha: Share that a sink keeps of itself.
        latest: Whether as many of the latest frames are taken instead of those that go.
        space: Side of the rotation that keys are averaged on: before it, `"pre"`.

    Reference: Reward Forcing, arXiv 2512.04678 (EMA-Sink).
    """

    unit: int
    sinks: int
    alpha: float
    latest: bool = False
    space: Literal["post", "pre"] = "pre"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with the first ones moved, and the plan as it is."""
        slots, unit = seen.slots, self.unit
        goes = plan[0, 0] < KEEP  # frames go by their age, in all rows the same
        count = int(goes.sum())
        first = slots.width - count if self.latest else self.sinks * unit
        k, v = slots.k.clone(), slots.v.clone()
        for start in range(first, first + count, unit):
            number = int(slots.pos[0, 0, start]) // unit
            sink = slice(number % self.sinks * unit, (number % self.sinks + 1) * unit)
            for column in (k, v):
                column[:, :, sink] = torch.lerp(column[:, :, start : start + unit], column[:, :, sink], self.alpha)
        return replace(slots, k=k, v=v), plan

"""Infinity-RoPE: a moving frame of reference, in which no position leaves the trained horizon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from diffcache.kv.positions import BlockRelativistic, Slot
from diffcache.kv.recipe import Recipe
from diffcache.ranges import Count, Whole
from diffcache.video.policy import VideoPolicy
from diffcache.video.window import rolling


@dataclass(frozen=True)
class InfinityRoPE(VideoPolicy):
    """Hold the first frames and the latest, and number them from the newest back.

    The released code numbers frames by their place in the cache (`slot`). The paper pins the newest
    frame to the end of the trained horizon, once it is reached, and moves all others back by as
    much; those that would come before the first frame are numbered as the first (`horizon`). Prompt
    switches of the paper are `diffcache.video.switch.Flush` and `diffcache.video.switch.Cut`.

    Departures: `window` does not count the chunk that is made, so that the six frames of the
    released code are one sink, two latest frames and a chunk of three. With `slot`, numbers end at
    the newest frame instead of beginning at 0, which rotary embedding does not see.

    Args:
        window: Latest frames that are held beside the chunk; None for all frames, which `horizon`
            alone can number without end.
        sinks: First frames, held for ever.
        numbering: `slot` or `horizon`.
        horizon: Frames that the model was trained on; `slot` does not look at it.

    Reference: Infinity-RoPE, arXiv 2511.20649 (Block-Relativistic RoPE), and its released code.
    """

    by_head: ClassVar[bool] = True
    window: Count | None = 2
    sinks: Whole = 1
    numbering: Literal["slot", "horizon"] = "slot"
    horizon: Count = 21

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops frames between the first and the latest."""
        positions = Slot() if self.numbering == "slot" else BlockRelativistic(self.horizon)
        if self.window is None:
            return Recipe(self.name, space="pre", positions=positions)
        return rolling(self.name, self.sinks * unit, self.window * unit, positions)

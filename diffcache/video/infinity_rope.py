"""Infinity-RoPE: a moving frame of reference, in which no position leaves the trained horizon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from diffcache.kv.positions import BlockRelativistic, Slot
from diffcache.kv.recipe import Recipe
from diffcache.method import check_int
from diffcache.video.policy import VideoPolicy
from diffcache.video.window import rolling

Numbering = Literal["slot", "horizon"]


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

    Raises:
        ValueError: If a number is out of its range, or `numbering` is unknown.

    Reference: Infinity-RoPE, arXiv 2511.20649 (Block-Relativistic RoPE), and its released code.
    """

    name: ClassVar[str] = "infinity-rope"

    by_head: ClassVar[bool] = True
    window: int | None = 2
    sinks: int = 1
    numbering: Numbering = "slot"
    horizon: int = 21

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("window", self.window, 1)
        check_int("sinks", self.sinks, 0)
        check_int("horizon", self.horizon, 1)
        if self.numbering not in get_args(Numbering):
            raise ValueError(f"numbering={self.numbering!r}: must be one of 'slot', 'horizon'")

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops frames between the first and the latest."""
        positions = Slot() if self.numbering == "slot" else BlockRelativistic(self.horizon)
        if self.window is None:
            return Recipe(self.name, space="pre", positions=positions)
        return rolling(self.name, self.sinks * unit, self.window * unit, positions)

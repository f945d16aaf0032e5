"""A rolling window of frames, with or without the first ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from diffcache.kv.budget import Uniform
from diffcache.kv.merge import Merger
from diffcache.kv.plan import TopK
from diffcache.kv.positions import Absolute, PositionMap, Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.recency import Recency
from diffcache.kv.trigger import EveryStep
from diffcache.ranges import Count, Whole
from diffcache.video.policy import VideoPolicy


@dataclass(frozen=True)
class Window(VideoPolicy):
    """Hold the first frames and the latest.

    With sinks and `positions="slot"` it is MotionStream's cache, where frames are numbered by their
    place in it. `sinks=0` with `positions="absolute"` is Self-Forcing's rolling cache.

    Departures: `window` does not count the chunk that is made, as `local_attn_size` of
    Self-Forcing's code does; numbers end at the newest frame instead of beginning at 0, which
    rotary embedding does not see.

    Args:
        window: Latest frames that are held beside the chunk.
        sinks: First frames, held for ever.
        positions: `slot` numbers the held frames without gaps; `absolute` leaves them their own
            numbers.

    Reference: MotionStream, arXiv 2511.01266, section 3.3; Self-Forcing, arXiv 2506.08009, and its
    released code (`local_attn_size`, `sink_size`).
    """

    by_head: ClassVar[bool] = True
    window: Count = 6
    sinks: Whole = 3
    positions: Literal["slot", "absolute"] = "slot"

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops frames between the first and the latest."""
        numbering = Slot() if self.positions == "slot" else Absolute()
        return rolling(self.name, self.sinks * unit, self.window * unit, numbering)


def rolling(name: str, sinks: int, window: int, positions: PositionMap, merge: Merger | None = None) -> Recipe:
    """Return the recipe that holds the first tokens and the latest, under positions, and may merge others."""
    return Recipe(
        name,
        score=Recency(),
        budget=Uniform(sinks + window),
        plan=TopK(sinks=sinks),
        merge=merge,
        trigger=EveryStep(1),
        space="pre",
        positions=positions,
    )

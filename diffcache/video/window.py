"""A rolling window of frames, with or without the first ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from diffcache.kv.budget import Uniform
from diffcache.kv.merge import Merger
from diffcache.kv.plan import TopK
from diffcache.kv.positions import Absolute, PositionMap, Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.recency import Recency
from diffcache.kv.trigger import EveryStep
from diffcache.method import check_int
from diffcache.video.policy import VideoPolicy

Numbering = Literal["slot", "absolute"]
NUMBERINGS: dict[str, PositionMap] = {"slot": Slot(), "absolute": Absolute()}


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

    name: ClassVar[str] = "window"

    by_head: ClassVar[bool] = True
    window: int = 6
    sinks: int = 3
    positions: Numbering = "slot"

    def __post_init__(self) -> None:
        check_int("window", self.window, 1)
        check_int("sinks", self.sinks, 0)
        if self.positions not in get_args(Numbering):
            raise ValueError(f"positions={self.positions!r}: must be one of 'slot', 'absolute'")

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops frames between the first and the latest."""
        numbering = NUMBERINGS[self.positions]
        return rolling(self.name, self.sinks * unit, self.window * unit, numbering)


def rolling(name: str, sinks: int, window: int, positions: PositionMap, merge: Merger | None = None) -> Recipe:
    """Return the recipe that holds the first tokens and the latest.

    Args:
        name: Name of the policy.
        sinks: First tokens.
        window: Latest tokens.
        positions: The numbers that frames are rotated under.
        merge: Merger of tokens that go into those that stay.
    """
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

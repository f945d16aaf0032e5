"""Reuse attention at an interval of its own for every kind of it (Pyramid Attention Broadcast)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from diffcache.features.base import When, check_int, length_of
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.ranges import Range, Share
from diffcache.step import Site, Step

Kept = Annotated[int, Range(1), " (1 always computes it)"]  # an interval in steps


@dataclass(frozen=True)
class ByKind(When):
    """Compute each kind of attention at an interval of its own, inside a part of the run.

    Args:
        every: Kind of attention (`self`, `temporal`, `cross`) -> its interval in steps, as pairs;
            a kind that is not there is always computed.
        start: Share of the run up to which all is computed, 0 to 1.
        end: Share of the run from which all is computed, 0 to 1.
    """

    every: tuple[tuple[str, int], ...]
    start: Share
    end: Share
    by_kind: ClassVar[bool] = True  # type: ignore[misc]

    def check(self) -> None:
        """Raise ValueError if an interval is below 1."""
        for kind, every in self.every:
            check_int("_".join((kind, "every")), every, 1, " (1 always computes it)")

    def should_compute(self, state: None, step: Step, probe: Tensor | None) -> bool:
        """Return True: the modules decide."""
        return True

    def computes_at(self, step: Step, site: str) -> bool:
        """Return whether a kind of attention is computed; raise AttachError if nobody said how long the run is."""
        total = length_of(step, f"start={self.start}, end={self.end}: shares of a run whose length nobody said")
        within = self.start * total < step.index < self.end * total
        return not within or step.index % dict(self.every).get(site, 1) == 0


@dataclass(frozen=True)
class PAB(FeatureMethod):
    """Reuse the outputs of attention, the longer the less a kind of it changes.

    Inside a part of the run each attention is computed at every step whose number its interval
    divides, and its output reused at the others. Cross-attention changes least from step to step,
    then attention over time, then that over space. Reference: Pyramid Attention Broadcast,
    arXiv 2408.12588, with the schedule of diffusers. Differs: the part of the run is said in shares
    of its steps, where diffusers has a range of timesteps (its 100 to 800 of evenly spaced ones are
    0.2 to 0.9); guidance branches keep features of their own, which diffusers mixes where they are
    two calls. Attention is `cross` where the module says so (`is_cross_attention` of diffusers),
    `temporal` in lists of blocks of that name, as Latte's, and `self` elsewhere.

    Args:
        self_every: Interval of attention over space, or over all tokens, in steps; 1 always
            computes it.
        temporal_every: Interval of attention over time.
        cross_every: Interval of cross-attention.
        start: Share of the run up to which all is computed, 0 to 1.
        end: Share of the run from which all is computed, 0 to 1.
    """

    self_every: Kept = 2
    temporal_every: Kept = 4
    cross_every: Kept = 6
    start: Share = 0.2
    end: Share = 0.9

    def parts(self) -> Combine:
        """Return the intervals of the kinds, and reuse of attention's output."""
        every = (("self", self.self_every), ("temporal", self.temporal_every), ("cross", self.cross_every))
        return Combine(ByKind(every, self.start, self.end), site=Site.ATTENTION)

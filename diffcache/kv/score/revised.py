"""Scores that revise what another score says."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score
from diffcache.kv.slots import Slots


class Revised(Score):
    """What another score says, changed; it observes what the other observes.

    Attributes:
        score: The other.
    """

    score: Score

    @property
    def window(self) -> int:
        """Number of last queries that are kept for the other."""
        return self.score.window

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics of the other."""
        return self.score.statistics

    @property
    def wants_out(self) -> bool:
        """Whether the other reads the weight of the output projection."""
        return self.score.wants_out

    @property
    def attends(self) -> bool:
        """Whether the statistics of the other are of attention."""
        return self.score.attends

    @property
    def looks_across(self) -> bool:
        """Whether scores of the other depend on other layers."""
        return self.score.looks_across

    def said(self, seen: Observation) -> Tensor:
        """Return what the other says, [B, H, S], -inf in empty slots."""
        score = self.score(seen).expand(seen.slots.k.shape[:3])
        return score.masked_fill(~seen.valid, float("-inf"))

    def across(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> Sequence[Tensor]:
        """Return what the other makes of the scores of all layers."""
        return self.score.across(scores, seen)

    def enter(self, stats: dict[str, Tensor], asked: Query, slots: Slots, layer: int) -> None:
        """Have the other take note of new tokens."""
        self.score.enter(stats, asked, slots, layer)

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Have the other take note of attention."""
        self.score.note(stats, attended)

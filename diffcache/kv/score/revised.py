"""Scores that revise what another score says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import Mass
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Count
from diffcache.kv.slots import Slots


class Revised(Score):
    """Scores of another scorer, changed; it observes what the other observes."""

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
        """Return whether the other reads the weight of the output projection."""
        return self.score.wants_out

    @property
    def attends(self) -> bool:
        """Return whether the statistics of the other are of attention."""
        return self.score.attends

    @property
    def looks_across(self) -> bool:
        """Return whether scores of the other depend on other layers."""
        return self.score.looks_across

    def __call__(self, seen: Observation) -> Tensor:
        """Return what the other says."""
        return self.score(seen)

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


@dataclass(frozen=True)
class Shared(Revised):
    """Have layers of a group use the scores of its first, and heads of a layer their mean.

    With the same budget they so keep the same tokens.

    Reference: WindowKV, arXiv 2503.17922, section 2.2.2 (layers; the others are scored as well,
    and their scores not used); PrefixKV, arXiv 2412.03409 (heads).

    Args:
        score: The scorer.
        group: Layers of a group; 1 leaves layers apart.
        heads: Average over the key-value heads of a layer.
    """

    score: Score
    group: Count = 1
    heads: bool = False

    def __call__(self, seen: Observation) -> Tensor:
        """Return the layer's own scores, [B, H, S]."""
        said = self.score(seen)
        return said.mean(1, keepdim=True).expand_as(said) if self.heads else said

    def across(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the scores of the first layer of each group; ValueError if others hold more or fewer slots."""
        found = []
        for index, score in enumerate(scores):
            first = scores[index // self.group * self.group]
            if first.shape != score.shape:
                raise ValueError(
                    f"group={self.group}: layer {index} holds {score.shape[-1]} slots and the "
                    f"first of its group {first.shape[-1]}; give layers of a group one budget"
                )
            found.append(first)
        return found


@dataclass(frozen=True)
class WithQueries(Revised):
    """A score, and the last queries kept for a codec that looks at them.

    Args:
        size: Number of last queries that are kept.
        score: Score of the slots.
    """

    size: Count = 32
    score: Score = field(default_factory=Mass)

    @property
    def window(self) -> int:
        """Number of last queries that are kept for it."""
        return max(self.size, self.score.window)

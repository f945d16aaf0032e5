"""EMS: how much all queries attended to a slot, and how much the last ones do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import Mass
from diffcache.kv.score.base import Score

_GLOBAL = Mass(mean=True)


@dataclass(frozen=True)
class GlobalLocal(Score):
    """Score by the attention of all queries and that of the last ones together.

    Sums over all queries favor early slots, which more queries see, so that they are divided by
    the number of those; the last queries favor what is near. Each sums to 1 in every row before
    they are added up.

    Reference: EMS, arXiv 2412.08521. The paper does not say how the two are scaled
    against each other.

    Args:
        size: Last queries that are looked at.
        local: Weight of the last queries, 0 to 1; the rest is that of all queries.

    Raises:
        ValueError: If a setting is out of its range.
    """

    size: int = 32
    local: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: must be at least 1 query")
        if not 0 <= self.local <= 1:
            raise ValueError(f"local={self.local!r}: must be between 0 and 1")

    @property
    def window(self) -> int:
        """Number of last queries that are kept for it."""
        return self.size

    @property
    def statistics(self) -> tuple[str, ...]:
        """Sums of attention, and how many queries could see a slot."""
        return _GLOBAL.statistics

    def __call__(self, seen: Observation) -> Tensor:
        """Return the weighted sum, [B, H, S]."""
        near = seen.window_mean(seen.probs(self.size)).mean(2)
        return (1 - self.local) * _shares(_GLOBAL(seen), seen) + self.local * _shares(near, seen)

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Add what the queries of a forward attended to."""
        _GLOBAL.note(stats, attended)


def _shares(x: Tensor, seen: Observation) -> Tensor:
    """Return [B, H, S] divided by the sums of its rows."""
    x = x.where(seen.valid, 0.0)
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)

"""Slots that queries keep overlooking."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diffcache.kv.attend import visible
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score


@dataclass(frozen=True)
class LowCount(Score):
    """Count how often the last queries gave a slot less than an even share; few is worth much.

    Reference: Scissorhands, arXiv 2305.17118, algorithm 2. The even share is of the
    slots that a query sees, which is the paper's 1 / t until something is dropped; attention of
    the history is taken over the slots that are held when they are scored; counts of the query
    heads of a key-value head are added.

    Args:
        history: Last queries that are counted.

    Raises:
        ValueError: If `history` is less than 1.
    """

    history: int = 400

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError(f"history={self.history}: must be at least 1 query")

    @property
    def window(self) -> int:
        """Number of last queries that are kept."""
        return self.history

    def __call__(self, seen: Observation) -> Tensor:
        """Return minus the count, [B, H, S]."""
        asked = seen.last(self.history)
        probs = seen.probs(self.history)
        here = visible(asked, seen.slots) & (asked.positions() >= 0)[:, None, :, None]
        share = here.sum(-1, keepdim=True).clamp_min(1).reciprocal()
        low = (probs < share[:, :, None]) & here[:, :, None]
        return -low.sum((2, 3)).float()

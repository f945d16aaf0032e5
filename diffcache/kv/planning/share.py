"""Keep a share of the budget for the latest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner, check_ends, protected, ranks


@dataclass(frozen=True)
class RecentShare(Planner):
    """Give a share of the budget to the latest tokens, and the rest to the highest scores.

    Args:
        share: Share of the budget for the latest tokens, from 0 to 1.
        sinks: First tokens that are always kept, out of the rest.

    Raises:
        ValueError: If a setting is out of its range.

    Reference: H2O, arXiv 2306.14048, section 5.1, where both shares are equal.
    """

    share: float = 0.5
    sinks: int = 0

    def __post_init__(self) -> None:
        check_ends(self.sinks, 0)
        if not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share}: must be from 0 to 1")

    def ends(self, budget: int) -> tuple[int, int]:
        """Return the first tokens, and the share of the latest."""
        return self.sinks, int(budget * self.share + 1e-9)

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        recent = (budget * self.share + 1e-9).floor().long()[..., None]
        place = torch.arange(score.shape[-1], device=score.device)
        is_last = place >= score.shape[-1] - recent
        first = protected(score, seen, self.sinks, 0)
        rank = ranks(first.masked_fill(is_last & seen.valid, float("inf")))
        keep = (rank < budget[..., None]) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)

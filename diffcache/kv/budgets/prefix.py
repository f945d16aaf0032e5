"""Layer budgets of equal information: one level of attention mass for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, Size, check_size, slots_for
from diffcache.kv.observe import Observation

_ROUNDS = 60  # of bisection: far below what two slots may differ by


@dataclass(frozen=True)
class CDFLevel(Budget):
    """Keep in every layer the fewest best slots that hold a share p of its score.

    p is the same in all layers and found by bisection, so that all layers together hold what
    `Uniform(size)` would, give or take one slot a layer. Scores are averaged over heads, which all
    get the same budget.

    Reference: PrefixKV, arXiv 2412.03409. The paper finds the shares of layers on a
    few samples and uses their average (`diffcache.kv.learn.prefixkv.layer_shares`, with
    `LayerTable`); here they are found for each row as it comes.

    Args:
        size: Slots of a row in the average layer, or a share of the tokens it has seen.
        least: Slots that every layer keeps.

    Raises:
        ValueError: If a number is out of range.
    """

    size: Size
    least: int = 1

    def __post_init__(self) -> None:
        check_size("size", self.size)
        if self.least < 0:
            raise ValueError(f"least={self.least}: must be at least 0 slots")

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the budgets; they follow the row's own level."""
        width = max(score.shape[-1] for score in scores)
        held = torch.stack([each.lengths.amax(1) for each in seen])
        total = torch.stack([slots_for(self.size, each.tokens[:, 0]) for each in seen]).sum(0)
        means, always = [], []
        for score in scores:
            mean = torch.nn.functional.pad(score.clamp_min(0).mean(1), (width - score.shape[-1], 0))
            always.append((mean == float("inf")).sum(-1))
            means.append(mean.masked_fill(mean == float("inf"), 0.0))
        stay = torch.stack(always)  # slots that are kept whatever the level
        rest = (total - stay.sum(0)).clamp_min(0)
        counts = stay + prefix_counts(torch.stack(means), held - stay, rest)
        counts = counts.maximum(held.clamp_max(self.least))
        return [
            count[:, None].minimum(each.lengths) for each, count in zip(seen, counts, strict=True)
        ]


def prefix_counts(scores: Tensor, held: Tensor, total: Tensor) -> Tensor:
    """Return how many of the best slots of each layer reach the level that all layers share.

    Args:
        scores: Score of each slot, at least 0, [L, B, S]; 0 in empty slots.
        held: Slots of each layer that are not empty, int64 [L, B].
        total: Slots that the counts add up to, give or take L, int64 [B].

    Returns:
        int64 [L, B].
    """
    ranked = scores.double().sort(-1, descending=True).values
    there = torch.arange(scores.shape[-1], device=scores.device) < held[..., None]
    # A trace of mass for every slot, so that those without any are reached last, at level 1.
    trace = 1e-9 * ranked.sum(-1, keepdim=True).clamp_min(1e-30) / held[..., None].clamp_min(1)
    mass = (ranked + trace) * there
    reached = (mass.cumsum(-1) / mass.sum(-1, keepdim=True).clamp_min(1e-300)).masked_fill(
        ~there, float("inf")
    )
    low, high = torch.zeros_like(total, dtype=torch.float64), torch.ones_like(total).double()
    for _ in range(_ROUNDS):
        level = (low + high) / 2
        fits = (reached <= level[:, None]).sum(-1).sum(0) <= total
        low, high = level.where(fits, low), high.where(fits, level)
    counts = (reached <= low[:, None]).sum(-1)
    return held.where(total >= held.sum(0), counts)

"""Whole slots by weights, between bounds, with an exact total."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 64  # halvings, until neighboring doubles are reached


def apportion(weights: Tensor, total: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Share out slots in proportion to weights, where bounds allow it.

    Shares are `clip(c * weight, low, high)` with the one factor `c` that makes up the total; what
    rounding down leaves goes to the largest fractions, of equals to the first.

    Args:
        weights: [N, ...] float, not negative; where all are zero they count as equal.
        total: [...] int64. Less than all of `low` gives `low`, more than all of `high` gives
            `high`.
        low: int64 like `weights`.
        high: int64 like `weights`, at least `low`.

    Returns:
        int64 [N, ...].
    """
    weights = weights.double()
    most = weights.amax(0)
    weights = (weights / most.where(most > 0, 1)).where(most > 0, 1.0)
    weights = weights.clamp_min(1e-9)  # a weight of zero takes what the bounds leave
    least, greatest = low.double(), high.double()
    total = total.maximum(low.sum(0)).minimum(high.sum(0))
    small = torch.full_like(most, -30.0)
    large = torch.full_like(most, 60.0)
    for _ in range(_STEPS):  # on the logarithm of the factor
        middle = (small + large) / 2
        over = _clipped(weights, middle, least, greatest).sum(0) > total
        large, small = middle.where(over, large), small.where(over, middle)
    exact = _clipped(weights, small, least, greatest)
    whole = (exact + 1e-6).floor().long().maximum(low).minimum(high)
    left = total - whole.sum(0)
    fraction = (exact - whole).masked_fill(whole >= high, -2.0)
    order = torch.argsort(fraction, dim=0, descending=True, stable=True)
    rank = torch.argsort(order, dim=0)
    return (whole + (rank < left).long()).minimum(high)


def _clipped(weights: Tensor, log: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (weights * log.exp()).maximum(low).minimum(high)

"""Forecasts and schedules of least squared error, from the inner products of features."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from math import inf
from typing import Any

import torch
from torch import Tensor


def best_steps(
    costs: Callable[[tuple[int, ...]], list[float]], total: int, computed: int, history: int, first: int = 1
) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of costs of all schedules, and the smallest steps of those that have it.

    The programme runs over the last `history` computed steps, on which `costs` depend, newest
    first, and is exact. `costs` returns those of the gaps from the first of them to every later one
    and to the end, `total + 1` numbers; infinity where none may be. The `first` steps are computed
    in any case. Returns infinity and no steps where no schedule may be.
    """
    lasting = cache(costs)
    start = tuple(range(first))
    best = {start[::-1][:history]: (0.0, start)} if first <= min(computed, total) else {}
    for made in range(first, computed):
        longer: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
        for anchors, (cost, steps) in best.items():
            gaps = lasting(anchors)
            for following in range(anchors[0] + 1, total - (computed - made) + 1):
                key = (following, *anchors)[:history]
                value = cost + gaps[following]
                if value < longer.get(key, (inf,))[0]:
                    longer[key] = value, (*steps, following)
        best = longer
    ends = ((cost + lasting(anchors)[total], steps) for anchors, (cost, steps) in best.items())
    return min((end for end in ends if end[0] < inf), default=(inf, ()))


class Fit:
    """Least-squares forecasts from the inner products of the features of a run's steps.

    Args:
        products: float64 [T, T].
        moves: float64 [T], how far the solver moves in each step.
        history: Features a forecast is made of.
        ridge: Share of the mean of the diagonal that is added to it.
    """

    def __init__(self, products: Tensor, moves: Tensor, history: int, ridge: float) -> None:
        self.products, self.moves = products.double(), moves.double()
        self.history, self.ridge, self.total = history, ridge, len(products)

    def coefficients(self, anchors: tuple[int, ...]) -> Tensor:
        """Return the weights of the features at `anchors` for every step, [len(anchors), T]."""
        first, *older = anchors
        rows = torch.eye(self.total, dtype=torch.float64)
        if not older:
            return torch.ones(1, self.total, dtype=torch.float64)
        past = rows[older] - rows[first]  # older features less the last one
        inner = past @ self.products @ past.T
        wanted = past @ self.products @ (rows - rows[first]).T
        eye = torch.eye(len(older), dtype=torch.float64)
        damped = inner + self.ridge * inner.diagonal().mean().clamp_min(1e-300) * eye
        solved = torch.linalg.solve(damped, wanted)
        return torch.cat([1 - solved.sum(0, keepdim=True), solved])

    def costs(self, anchors: tuple[int, ...]) -> list[float]:
        """Return the error of a gap from `anchors[0]` to every next computed step, T + 1 numbers.

        Entry n is `|sum_{anchors[0] < s < n} w_s (forecast_s - F_s)|^2`.
        """
        errors = torch.zeros(self.total, self.total, dtype=torch.float64)
        errors[:, list(anchors)] = self.coefficients(anchors).T
        errors -= torch.eye(self.total, dtype=torch.float64)
        errors *= self.moves[:, None]
        errors[: anchors[0] + 1] = 0
        sums = torch.cat([torch.zeros_like(errors[:1]), errors.cumsum(0)])
        found: list[float] = ((sums @ self.products) * sums).sum(1).clamp_min(0).tolist()
        return found

    def schedule(self, computed: int) -> tuple[int, ...]:
        """Return the `computed` steps with the least sum of errors; the first is step 0."""
        return best_steps(self.costs, self.total, computed, self.history)[1]

    def weights(self, steps: tuple[int, ...]) -> tuple[Any, ...]:
        """Return `(step, anchors, weights)` of every skipped step of a schedule."""
        found = []
        for position, anchor in zip(count(), steps, strict=False):
            anchors = tuple(reversed(steps[: position + 1]))[: self.history]
            coefficients = self.coefficients(anchors)
            end = steps[position + 1] if position + 1 < len(steps) else self.total
            found += [(step, anchors, tuple(coefficients[:, step].tolist())) for step in range(anchor + 1, end)]
        return tuple(found)

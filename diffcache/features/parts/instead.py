"""Stand-ins for a skipped feature: reuse, Taylor's forecast, Newton's forecast."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, mul
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from diffcache.features.base import Instead, Order
from diffcache.foreign import add_all
from diffcache.kernels.forecast import SUM, finite_differences, sum_twin, weighted_sum
from diffcache.ranges import Whole
from diffcache.step import Step

FUSED = 4  # states from which one fused launch takes less time on the host than one each


@dataclass(frozen=True)
class Reuse(Instead):
    """Use the last computed feature again."""

    def record(self, state: list[Tensor], step: Step, feature: Tensor) -> None:
        """Keep the feature, forget the last."""
        state[:] = [feature]

    def estimate(self, state: list[Tensor], step: Step) -> Tensor:
        """Return the kept feature itself."""
        return state[0]

    def held(self, state: list[Tensor]) -> list[Tensor]:
        """Return the one kept tensor."""
        return state


class Summed(Instead):
    """Forecast with a weighted sum of held tensors; a kernel takes one pass over memory for it.

    Its states hold the tensors as `factors`.
    """

    @abstractmethod
    def weights(self, state: Any, step: Step) -> list[float]:
        """Return the weight of every factor; the first is 1."""

    def estimate(self, state: Any, step: Step) -> Tensor:
        """Return the weighted sum of the factors."""
        if len(state.factors) == 1:
            return cast(Tensor, state.factors[0])
        return weighted_sum(state.factors, self.weights(state, step))

    def estimate_all(self, states: Sequence[Any], step: Step, bases: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return every state's estimate; a base is added in the same pass."""
        if len(states) >= FUSED:
            found = self.fused(states, step, bases)
            if found is not None:
                return found
        if bases is None:
            return super().estimate_all(states, step)
        weights = self.weights(states[0], step)  # all of a call have the same age
        add_up = weighted_sum if SUM.takes(*states[0].factors) else sum_twin
        sums: list[Tensor] = []
        for state, base in zip(states, bases, strict=True):
            sums.append(add_up(state.factors, weights, base))
        return sums

    def fused(self, states: Sequence[Any], step: Step, bases: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return every state's estimate, made together; None where that is not possible."""
        return None

    def adds_at_once(self, state: Any) -> bool:
        """Return whether the kernel of weighted sums runs."""
        return len(state.factors) > 1 and SUM.takes(*state.factors)

    def held(self, state: Any) -> list[Tensor]:
        """Return the factors."""
        return cast("list[Tensor]", state.factors)

    def is_held(self, state: Any) -> bool:
        """Return whether there is nothing to add to the last feature."""
        return len(state.factors) == 1


@dataclass
class Differences:
    """Differences of a feature at its last computed steps, lowest order first."""

    factors: list[Tensor] = field(default_factory=list)
    anchor: int = 0


@dataclass(frozen=True)
class Taylor(Summed):
    """Forecast with finite differences in the place of derivatives.

    With the factors `g_0 = F` and `g_{i+1} = (g_i - old g_i) / d`, where `d` is the distance to
    the computed step before, in steps, the estimate `k` steps later is the sum of
    `g_i * k**i / i!` (TaylorSeer, arXiv 2503.06923, section 3.3, and its official code). Exact
    for features that are affine in the step index; not for higher polynomials at any order.

    Args:
        order: Highest order, 0 (reuse) to 4.
        start: First step index at which differences are taken.
    """

    state: ClassVar[type] = Differences

    order: Order = 1
    start: Whole = 0

    def record(self, state: Differences, step: Step, feature: Tensor) -> None:
        """Replace the factors by those of the fresh feature."""
        distance = step.index - state.anchor
        taken = self.order if step.index >= self.start and distance else 0
        distances = [distance] * min(taken, len(state.factors))
        state.factors = finite_differences(state.factors, feature, distances)
        state.anchor = step.index

    def weights(self, state: Differences, step: Step) -> list[float]:
        """Return the weight of every factor."""
        distance, found = step.index - state.anchor, [1.0]
        for power in range(1, len(state.factors)):
            found.append(distance**power / math.factorial(power))
        return found

    def fused(self, states: Sequence[Differences], step: Step, bases: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return every state's estimate, with one fused launch an order."""
        factors = [state.factors for state in states]
        anchor = states[0].anchor
        if len(set(map(len, factors))) > 1 or any(state.anchor != anchor for state in states):
            return None
        if factors[0][0].dtype is torch.float16:  # partial sums may overflow it
            return None
        levels = zip(*factors, strict=True)
        totals = list(next(levels))
        for weight, terms in zip(self.weights(states[0], step)[1:], levels, strict=True):
            totals = list(add_all(totals, terms, alpha=weight))
        return totals if bases is None else list(map(add, bases, totals))


@dataclass
class DividedDifferences:
    """Newton's table: divided differences and the step indices they were taken at, newest first."""

    factors: list[Tensor] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Newton(Summed):
    """Forecast with Newton's interpolation through the last `order + 1` computed features.

    `g_{i+1} = (g_i - old g_i) / (s_0 - s_{i+1})` are true divided differences over the computed
    steps `s_0 > s_1 > ...`, and the estimate is the sum of `g_i * prod_{j<i} (s - s_j)`: exact on
    polynomials of degree `order` at any spacing once `order + 1` steps were computed. The
    TaylorSeer paper's own form is `Taylor`.

    Settings are those of `Taylor`.
    """

    state: ClassVar[type] = DividedDifferences

    order: Order = 1
    start: Whole = 0

    def record(self, state: DividedDifferences, step: Step, feature: Tensor) -> None:
        """Replace the table by that of the fresh feature."""
        fresh = step.index >= self.start and step.index not in state.anchors
        anchors = state.anchors[: self.order] if fresh else []
        distances = [step.index - anchor for anchor in anchors]
        state.factors = finite_differences(state.factors, feature, distances)
        state.anchors = [step.index, *anchors]

    def weights(self, state: DividedDifferences, step: Step) -> list[float]:
        """Return the values at this step of Newton's basis."""
        distances = [step.index - anchor for anchor in state.anchors[:-1]]
        return [1.0, *map(float, accumulate(distances, mul))]

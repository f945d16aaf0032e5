"""What stands in for a skipped feature: reuse, Taylor's forecast, Newton's forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffcache.features.base import Instead, check_int
from diffcache.foreign import add_all
from diffcache.step import Step

MAX_ORDER = 4
FUSED = 4  # states from which one fused launch takes less time on the host than one each


@dataclass(frozen=True)
class Reuse(Instead):
    """Use the last computed feature again."""

    def init(self) -> list[Tensor]:
        """Return an empty state."""
        return []

    def record(self, state: list[Tensor], step: Step, feature: Tensor) -> None:
        """Keep the feature, forget the last."""
        state[:] = [feature]

    def estimate(self, state: list[Tensor], step: Step) -> Tensor:
        """Return the kept feature itself."""
        return state[0]

    def held(self, state: list[Tensor]) -> list[Tensor]:
        """Return the one kept tensor."""
        return state


@dataclass
class Differences:
    """Differences of a feature at its last computed steps, lowest order first."""

    factors: list[Tensor] = field(default_factory=list)
    anchor: int = 0


@dataclass(frozen=True)
class Taylor(Instead):
    """Forecast with finite differences in the place of derivatives.

    With the factors `g_0 = F` and `g_{i+1} = (g_i - old g_i) / d`, where `d` is the distance to
    the computed step before, in steps, the estimate `k` steps later is the sum of
    `g_i * k**i / i!` (TaylorSeer, arXiv 2503.06923, section 3.3, and its official code). Exact
    for features that are affine in the step index; not for higher polynomials at any order.

    Args:
        order: Highest order, 0 (reuse) to 4.
        start: First step index at which differences are taken.

    Raises:
        ValueError: If `order` is not 0 to 4 or `start` is negative.
    """

    order: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        check_order("order", self.order)
        check_int("start", self.start, 0)

    def init(self) -> Differences:
        """Return an empty state."""
        return Differences()

    def record(self, state: Differences, step: Step, feature: Tensor) -> None:
        """Replace the factors by those of the fresh feature."""
        factors = [feature]
        distance = step.index - state.anchor
        if step.index >= self.start and distance:
            for old in state.factors[: self.order]:
                factors.append((factors[-1] - old) / distance)
        state.factors, state.anchor = factors, step.index

    def estimate(self, state: Differences, step: Step) -> Tensor:
        """Return the sum of the factors' terms at this step."""
        distance = step.index - state.anchor
        total = state.factors[0]
        for power, factor in enumerate(state.factors[1:], start=1):
            total = torch.add(total, factor, alpha=distance**power / math.factorial(power))
        return total

    def estimate_all(self, states: Sequence[Differences], step: Step) -> list[Tensor]:
        """Return every state's estimate; of many states with one fused launch an order."""
        factors = [state.factors for state in states]
        anchor = states[0].anchor
        if (
            len(states) < FUSED
            or len(set(map(len, factors))) > 1
            or any(state.anchor != anchor for state in states)
        ):
            return [self.estimate(state, step) for state in states]
        distance = step.index - anchor
        levels = zip(*factors, strict=True)
        totals = list(next(levels))
        for power, terms in enumerate(levels, start=1):
            alpha = distance**power / math.factorial(power)
            totals = list(add_all(totals, terms, alpha=alpha))
        return totals

    def held(self, state: Differences) -> list[Tensor]:
        """Return the factors."""
        return state.factors

    def is_held(self, state: Differences) -> bool:
        """Return whether there is nothing to add to the last feature."""
        return len(state.factors) == 1


@dataclass
class DividedDifferences:
    """Newton's table: divided differences and the step indices they were taken at, newest first."""

    factors: list[Tensor] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Newton(Instead):
    """Forecast with Newton's interpolation through the last `order + 1` computed features.

    `g_{i+1} = (g_i - old g_i) / (s_0 - s_{i+1})` are true divided differences over the computed
    steps `s_0 > s_1 > ...`, and the estimate is the sum of `g_i * prod_{j<i} (s - s_j)`: exact on
    polynomials of degree `order` at any spacing once `order + 1` steps were computed. The
    TaylorSeer paper's own form is `Taylor`.

    Args:
        order: Highest order, 0 (reuse) to 4.
        start: First step index at which differences are taken.

    Raises:
        ValueError: If `order` is not 0 to 4 or `start` is negative.
    """

    order: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        check_order("order", self.order)
        check_int("start", self.start, 0)

    def init(self) -> DividedDifferences:
        """Return an empty state."""
        return DividedDifferences()

    def record(self, state: DividedDifferences, step: Step, feature: Tensor) -> None:
        """Replace the table by that of the fresh feature."""
        factors, anchors = [feature], [step.index]
        if step.index >= self.start and step.index not in state.anchors:
            for old, anchor in zip(
                state.factors[: self.order], state.anchors[: self.order], strict=True
            ):
                factors.append((factors[-1] - old) / (step.index - anchor))
                anchors.append(anchor)
        state.factors, state.anchors = factors, anchors

    def estimate(self, state: DividedDifferences, step: Step) -> Tensor:
        """Return the interpolating polynomial at this step."""
        total, weight = state.factors[0], 1
        for factor, anchor in zip(state.factors[1:], state.anchors[:-1], strict=True):
            weight *= step.index - anchor
            total = torch.add(total, factor, alpha=float(weight))
        return total

    def held(self, state: DividedDifferences) -> list[Tensor]:
        """Return the table."""
        return state.factors

    def is_held(self, state: DividedDifferences) -> bool:
        """Return whether there is nothing to add to the last feature."""
        return len(state.factors) == 1


def check_order(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a whole number from 0 to 4."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ORDER:
        raise ValueError(f"{name}={value!r}: must be a whole number from 0 (reuse) to {MAX_ORDER}")

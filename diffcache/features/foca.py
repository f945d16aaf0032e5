"""Forecast features with a predictor and a corrector of differential equations (FoCa)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from diffcache.features.base import Spacing, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Summed
from diffcache.features.parts.when import Every
from diffcache.step import Site, Step

FAR = 3  # steps from a computed one beyond which the forecast turns back to it


@dataclass
class Slopes:
    """A computed feature, its slope from the computed one before, and from the value before it."""

    factors: list[Tensor] = field(default_factory=list)
    anchor: int = 0


@dataclass(frozen=True)
class Heun(Summed):
    """Forecast from the last computed feature `F` with the mean of two slopes.

    `k` steps on the estimate is `F + k / 2 * (a + b)` with the slope `a` between the last two
    computed features and the slope `b` between the last two values, computed or estimated; beyond
    three steps that of the third is weighted with `3 / k`, and `F` with the rest. An estimate is a
    weighted sum of `F`, `a` and the first `b`, so that the state does not change with it.

    Settings are those of `FoCa`.
    """

    state: ClassVar[type] = Slopes

    unit: bool = False

    def record(self, state: Slopes, step: Step, feature: Tensor) -> None:
        """Replace the slopes by those at the fresh feature."""
        old, distance = state.factors, step.index - state.anchor
        if not old or distance < 1:
            state.factors, state.anchor = [feature], step.index
            return
        slope = feature - old[0]
        latest = slope
        if distance > 1 and len(old) > 1:  # the step before was estimated
            latest = feature - self.estimate(state, Step(step.index - 1))
        elif distance > 1 and not self.unit:
            latest = slope / distance
        state.factors = [feature, slope if self.unit else slope / distance, latest]
        state.anchor = step.index

    def weights(self, state: Slopes, step: Step) -> list[float]:
        """Return the weights of the feature and the slopes."""
        before, now = (0.0, 0.0), (0.0, 0.0)
        local = (0.0, 1.0)  # the slope between the last two values, of `a` and the first `b`
        for ahead in range(1, step.index - state.anchor + 1):
            share = ahead / 2 if ahead <= FAR else FAR / ahead * FAR / 2
            before, now = now, (share * (1 + local[0]), share * local[1])
            local = now[0] - before[0], now[1] - before[1]
        return [1.0, *now][: len(state.factors)]


@dataclass(frozen=True)
class FoCa(FeatureMethod):
    """Forecast as an equation's solver would: along the features, corrected at the computed ones.

    Reference: FoCa, arXiv 2508.16211 (features follow a differential equation; a predictor from the
    values before, a corrector after Heun), in the form of cache-dit's `FoCaCalibrator`. Differs:
    slopes between computed steps are divided by their distance, which makes the forecast exact
    where features are affine in the step, up to three steps on; cache-dit takes them as one step
    apart (`unit=True`). Compared with cache-dit, not with code of the authors.

    Args:
        every: Interval in steps; 1 turns the cache off.
        warmup: First steps that are always computed, at least 1.
        site: Site of the features, a `Site` or its name.
        unit: Take computed steps as one step apart, as cache-dit does.
    """

    every: Spacing = 4
    warmup: Warmup = 3
    site: Site | str = Site.STACK
    unit: bool = False

    def parts(self) -> Combine:
        """Return one step in `every` after the warm-up, and the corrected forecast."""
        return Combine(Every(self.every, self.warmup), Heun(self.unit), self.site)

"""Forecast features by a ridge fit of Chebyshev polynomials over the steps (Spectrum)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from numpy.polynomial.chebyshev import chebvander
from torch import Tensor

from diffcache.features.base import Instead, Warmup, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.ranges import Count, Factor, NotNegative, Positive, Range, Share
from diffcache.step import Site, Step


@dataclass
class Sums:
    """Sums over computed steps, from which a fit follows."""

    anchors: list[int] = field(default_factory=list)  # the computed steps
    last: list[Tensor] = field(default_factory=list)  # the last features, newest first
    sums: list[Tensor] = field(default_factory=list)  # sum over steps of polynomial times feature, float32, by degree


@dataclass(frozen=True)
class Chebyshev(Instead):
    """Forecast with the ridge fit of Chebyshev polynomials to all computed features.

    With `x(s)` the polynomials 0 to `degree` at `2 s / horizon - 1`, the estimate is
    `x(s)^T (X^T X + ridge I)^-1 X^T H` over the computed steps. `X^T H` is summed up as features
    come, so that `degree + 2` tensors are held, however many steps were computed.

    Settings are those of `Spectrum`.
    """

    state: ClassVar[type] = Sums

    degree: Annotated[int, Range(0, 8)] = 4
    ridge: Positive = 0.1
    blend: Share = 1.0
    horizon: Count = 50

    def record(self, state: Sums, step: Step, feature: Tensor) -> None:
        """Add the feature to the sums."""
        if not state.sums:
            zeros = torch.zeros_like(feature, dtype=torch.float32)
            state.sums = [zeros.clone() for _ in range(self.degree + 1)]
        weights = self._polynomials([step.index])[0].tolist()
        state.sums = [
            torch.add(total, feature, alpha=weight) for total, weight in zip(state.sums, weights, strict=True)
        ]
        kept = 1 if self.blend == 1 else 2
        state.last = [feature, *state.last][:kept]
        state.anchors.append(step.index)

    def estimate(self, state: Sums, step: Step) -> Tensor:
        """Return the fit's value; at the step that was just recorded, the feature itself."""
        feature, anchors = state.last[0], state.anchors
        if step.index == anchors[-1]:
            return feature
        design = self._polynomials(anchors)
        normal = design.T @ design + self.ridge * torch.eye(self.degree + 1, dtype=torch.float64)
        weights = torch.linalg.solve(normal, self._polynomials([step.index])[0]).tolist()
        found: Tensor = state.sums[0] * (self.blend * weights[0])
        for total, weight in zip(state.sums[1:], weights[1:], strict=True):
            found.add_(total, alpha=self.blend * weight)
        if self.blend < 1:
            found.add_(feature, alpha=1 - self.blend)
            if len(state.last) > 1:
                ahead = (step.index - anchors[-1]) / (anchors[-1] - anchors[-2])
                found.add_(feature - state.last[1], alpha=(1 - self.blend) * ahead)
        return found.to(feature.dtype)

    def _polynomials(self, steps: list[int]) -> Tensor:
        """Return the polynomials at steps, float64 [steps, degree + 1]."""
        places = [2 * step / self.horizon - 1 for step in steps]
        return torch.from_numpy(chebvander(places, self.degree))


@dataclass
class Growing:
    """The last computed step, and the interval after it."""

    index: int = -1
    window: float = 0.0


@dataclass(frozen=True)
class Widening(When):
    """Compute the first `warmup` steps, then at intervals that grow.

    Settings are those of `Spectrum`.
    """

    window: Factor
    growth: NotNegative
    warmup: Warmup = 1

    def init(self) -> Growing:
        """Return an empty run."""
        return Growing(window=self.window)

    def should_compute(self, state: Growing, step: Step, probe: Tensor | None) -> bool:
        """Return whether the step is warm-up or an interval after the last computed one."""
        within = step.index < self.warmup or state.index < 0
        return within or step.index - state.index >= math.floor(state.window)

    def computed(self, state: Growing, step: Step, probe: Tensor | None) -> None:
        """Start a wider interval."""
        state.index = step.index
        if step.index >= self.warmup:
            state.window = round(state.window + self.growth, 3)


@dataclass(frozen=True)
class Spectrum(FeatureMethod):
    """Forecast the stack's output by a fit over all computed steps, at widening intervals.

    Reference: Spectrum, arXiv 2603.01623 (Chebyshev polynomials, ridge regression, intervals that
    widen), with the defaults of SGLang and of the released code: polynomials over 50 steps whatever
    the run's length, and a blend with a line through the last two computed features, which the
    paper has not. Differs: all computed steps are fitted, of which the code keeps the last 100;
    the same number of tensors is held in a run of any length.

    Args:
        window: First interval after the warm-up, in steps; 1 with `growth=0` turns the cache off.
        growth: What each computed step adds to the interval (`flex_window`): 0.75, or 3 for fewer
            computed steps.
        warmup: First steps that are always computed, at least 1.
        degree: Highest degree of the polynomials, 0 to 8; `degree + 2` tensors are held.
        ridge: Strength of the ridge.
        blend: Weight of the fit, 0 to 1; the rest is a line through the last two features.
        horizon: Number of steps that is mapped to the interval of the polynomials.
    """

    window: Factor = 2.0
    growth: NotNegative = 0.75
    warmup: Warmup = 5
    degree: Annotated[int, Range(0, 8)] = 4
    ridge: Positive = 0.1
    blend: Share = 1.0
    horizon: Count = 50

    def parts(self) -> Combine:
        """Return the widening intervals, and the fit of the stack's output."""
        instead = Chebyshev(self.degree, self.ridge, self.blend, self.horizon)
        when = Widening(self.window, self.growth, self.warmup)
        return Combine(when, instead, Site.STACK, feature="output")

"""Forecast features with Hermite polynomials in place of Taylor's monomials (HiCache)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from numpy.polynomial.hermite import hermvander
from torch import Tensor

from diffcache.features.base import Order, Spacing, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Differences, Summed, Taylor
from diffcache.features.parts.when import Every
from diffcache.ranges import SomeShare, Whole
from diffcache.step import Site, Step


@dataclass(frozen=True)
class Hermite(Summed):
    """Forecast with scaled Hermite polynomials of the finite differences that `Taylor` takes.

    `k` steps on, the estimate is the sum of `g_i / i! * sigma**i * H_i(sigma * k)`, with the
    physicists' polynomials `H_0 = 1`, `H_1 = 2 x`, `H_{i+1} = 2 x H_i - 2 i H_{i-1}`.

    Settings are those of `HiCache`; differences are taken from step `start` on. At
    `sigma=sqrt(1/2)` order 1 is Taylor's.
    """

    state: ClassVar[type] = Differences

    order: Order = 2
    sigma: SomeShare = 0.5
    start: Whole = 0

    def record(self, state: Differences, step: Step, feature: Tensor) -> None:
        """Replace the factors by those of the fresh feature."""
        Taylor(self.order, self.start).record(state, step, feature)

    def weights(self, state: Differences, step: Step) -> list[float]:
        """Return the weight of every factor; 0 at the recorded step, where not all `H_i` are."""
        highest, ahead = len(state.factors) - 1, step.index - state.anchor
        if not ahead:
            return [1.0] + [0.0] * highest
        values = hermvander(self.sigma * ahead, highest).ravel().tolist()
        return [self.sigma**i / math.factorial(i) * value for i, value in enumerate(values)]


@dataclass(frozen=True)
class HiCache(FeatureMethod):
    """Compute one step in `every` and forecast the others with scaled Hermite polynomials.

    Reference: HiCache, arXiv 2508.16984 (Hermite polynomials for features whose derivatives are
    Gaussian, scaled inside and outside), with the schedule and the differences of TaylorSeer.
    Differs: the site is `stack`, where the paper's is every module (`site="module"`). Compared with
    two implementations under permissive licenses, `hicache-pp` and that in FreqCa's released code;
    not with the authors' own code.

    Args:
        every: Interval in steps; 1 turns the cache off.
        order: Highest order of differences, 0 (reuse) to 4; `order + 1` tensors a feature.
        sigma: Scale of the polynomials, above 0 and at most 1; dimensionless. Lower is closer to
            reuse; 0.5 in `hicache-pp`, 0.71 in FreqCa, with which lines are nearly exact.
        warmup: First steps that are always computed, at least 1.
        site: Site of the features, a `Site` or its name.
    """

    every: Spacing = 5
    order: Order = 2
    sigma: SomeShare = 0.5
    warmup: Warmup = 3
    site: Site | str = Site.STACK

    def parts(self) -> Combine:
        """Return one step in `every` after the warm-up, and the Hermite forecast."""
        when = Every(self.every, self.warmup)
        return Combine(when, Hermite(self.order, self.sigma, start=self.warmup - 1), self.site)

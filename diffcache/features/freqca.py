"""Reuse the low frequencies of features over the tokens and forecast the high ones (FreqCa)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffcache.features.base import Order, Spacing, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.hicache import Hermite
from diffcache.features.parts.instead import Differences
from diffcache.features.parts.when import Every
from diffcache.ranges import Share, SomeShare
from diffcache.step import Site, Step


def high_band(values: Tensor, share: float) -> Tensor:
    """Return values without their low frequencies, up to a share of the highest, over the tokens, or over space.

    Values `[B, T, D]` are taken over T, `[B, C, ...]` over all axes after C as one.
    """
    is_tokens = values.dim() == 3
    lines = values.float() if is_tokens else values.float().flatten(min(values.dim() - 1, 2))
    axis = 1 if is_tokens else -1
    count = lines.shape[axis]
    places = torch.fft.rfftfreq(count, device=values.device)
    is_high = (places > share * places.max()).reshape(-1, 1 if is_tokens else places.numel())
    found: Tensor = torch.fft.irfft(torch.fft.rfft(lines, dim=axis) * is_high, n=count, dim=axis)
    return found.reshape(values.shape).to(values.dtype)


@dataclass(frozen=True)
class HighBand(Hermite):
    """Forecast the high frequencies of a feature with Hermite polynomials, and reuse the low ones.

    Filtering is linear, so that it is done once, on the first difference: the estimate is the last
    feature itself plus the weighted differences of its high band.

    Settings are those of `FreqCa`; differences are taken from step `start` on.
    """

    sigma: SomeShare = 0.71
    share: Share = field(default=0.1, kw_only=True)

    def record(self, state: Differences, step: Step, feature: Tensor) -> None:
        """Replace the factors by the fresh feature and the differences of its high band."""
        old, distance = state.factors, step.index - state.anchor
        taken = self.order if step.index >= self.start and distance else 0
        fresh = [feature]
        for number, before in enumerate(old[:taken]):
            change = (fresh[-1] - before) / distance
            fresh.append(change if number else high_band(change, self.share))
        state.factors, state.anchor = fresh, step.index


@dataclass(frozen=True)
class FreqCa(FeatureMethod):
    """Reuse the low frequencies of the stack's output and forecast the high ones.

    Low frequencies stay alike from step to step but do not go on as they went; high ones do.
    Reference: FreqCa, arXiv 2510.08669, and its released code (schedule, differences, the order-2
    Hermite forecast at scale 0.71, the stack's output as the feature, bands by a Fourier transform
    over the tokens as for Qwen-Image). Left out: the cosine transform that the paper takes for
    FLUX, which needs tokens in a square, and the experimental look-ahead (`use_z_cache`). Differs:
    every stream is filtered, where the code keeps that of the image alone. Where processes share
    the tokens of a sample, each takes the bands of its own.

    Args:
        every: Interval in steps; 1 turns the cache off. 6 or 9 at 50 steps in the paper.
        order: Highest order of the forecast, 0 (reuse) to 4; `order + 1` tensors are held.
        sigma: Scale of the polynomials, above 0 and at most 1; dimensionless.
        share: Share of the highest frequency up to which a frequency is low, 0 to 1.
        warmup: First steps that are always computed, at least 1.
    """

    every: Spacing = 6
    order: Order = 2
    sigma: SomeShare = 0.71
    share: Share = 0.1
    warmup: Warmup = 3

    def parts(self) -> Combine:
        """Return one step in `every` after the warm-up, and the forecast of the high band."""
        when = Every(self.every, self.warmup)
        instead = HighBand(self.order, self.sigma, self.warmup - 1, share=self.share)
        return Combine(when, instead, Site.STACK, feature="output")

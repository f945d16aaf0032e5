"""Forecast features as sums of exponentials, by dynamic mode decomposition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from diffcache.features.base import Instead, Spacing, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.when import Every
from diffcache.ranges import Range, Whole
from diffcache.step import Site, Step

LEAST = 4  # features a fit needs: a pair of complex exponentials takes three
SMALL = 1e-4  # singular values below this part of the largest are noise
RIDGE = 1e-8
History = Annotated[int, Range(LEAST)]


@dataclass
class Snapshots:
    """The last computed features, oldest first."""

    features: list[Tensor] = field(default_factory=list)  # the features
    anchors: list[int] = field(default_factory=list)  # their steps
    # two steps -> inner products of their features, one a sample
    products: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    # of each sample, how the exponentials are made of the features, and the exponents; None where nothing was fitted
    # since the last feature
    modes: list[tuple[Tensor, Tensor]] | None = None


def modes_of(products: Tensor, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Fit `Y[t + 1] = A Y[t]` to a window of vectors, of which their inner products suffice, float64 `[n, n]`.

    The vectors, oldest first, are written in an orthonormal basis of their span, `[n, n]`, where
    the propagator is found as in the whole space (Schmid 2010): a singular value decomposition of
    all but the last, cut at `SMALL` of the largest and at `rank`, 0 for none, the eigenvalues of
    the propagator in it, and the amplitudes at the last vector by least squares.

    Returns complex `[n - 1, r]` and `[r]`: `k` spacings after the last vector its successor is `sum
    over j of Re(parts @ exponents**k)[j] * Y[j + 1]`.
    """
    values, vectors = torch.linalg.eigh(products)
    window = values.clamp(min=0).sqrt()[:, None] * vectors.T  # its columns are the vectors
    left, size, right = torch.linalg.svd(window[:, :-1], full_matrices=False)
    kept = max(int((size > size[0] * SMALL).sum()), 1)
    kept = min(kept, rank) if rank else kept
    inverse = (right[:kept].T / (size[:kept] + RIDGE)).to(torch.complex128)
    after = window[:, 1:].to(torch.complex128)
    small = left[:, :kept].T.to(torch.complex128) @ after @ inverse
    exponents, eigenvectors = torch.linalg.eig(small)
    parts = inverse @ eigenvectors
    now = window[:, -1:].to(torch.complex128)
    return parts * torch.linalg.lstsq(after @ parts, now).solution[:, 0], exponents


@dataclass(frozen=True)
class Exponentials(Instead):
    """Forecast with the exponentials that the last evenly spaced features are sums of.

    With fewer than four of those, the forecast is a line through the last two features, from step 2
    on. The fit is made at the first skipped step after a computed one, for each sample of a batch;
    the host waits for its inner products.

    Settings are those of `DMD`.
    """

    state: ClassVar[type] = Snapshots

    history: History = 6
    rank: Whole = 0

    def record(self, state: Snapshots, step: Step, feature: Tensor) -> None:
        """Keep the feature, forget the oldest."""
        state.features = [*state.features, feature][-self.history :]
        state.anchors = [*state.anchors, step.index][-self.history :]
        state.modes = None

    def estimate(self, state: Snapshots, step: Step) -> Tensor:
        """Return the exponentials' sum; at the step that was just recorded, the feature itself."""
        feature, anchors = state.features[-1], state.anchors
        ahead = step.index - anchors[-1]
        if not ahead or len(anchors) < 2:
            return feature
        spacing, count = anchors[-1] - anchors[-2], 2
        while count < len(anchors) and anchors[-count] - anchors[-count - 1] == spacing:
            count += 1
        if count < LEAST:
            line = anchors[-1] > 1
            slope = (feature - state.features[-2]) * (ahead / spacing) if line else 0
            return feature + slope
        if state.modes is None:
            state.modes = [modes_of(each, self.rank) for each in self._products(state, count)]
        rows = [(parts @ powers ** (ahead / spacing)).real for parts, powers in state.modes]
        weights = torch.stack(rows).float()
        if not torch.isfinite(weights).all():
            return feature
        total = torch.zeros_like(feature, dtype=torch.float32)
        shape = (-1, *(1,) * (feature.dim() - 1))
        pairs = zip(weights.to(feature.device).T, state.features[1 - count :], strict=True)
        for weight, each in pairs:
            total.addcmul_(each.float(), weight.reshape(shape))
        found = total.to(feature.dtype)
        return found if torch.isfinite(found).all() else feature

    def _products(self, state: Snapshots, count: int) -> Tensor:
        """Return the inner products of the last features, float64 [B, count, count]."""
        steps, features = state.anchors[-count:], state.features[-count:]
        known = {key: value for key, value in state.products.items() if key[0] in steps}
        rows = features[0].shape[0] if features[0].dim() > 1 else 1
        flat = [each.reshape(rows, -1) for each in features]
        table = torch.empty(rows, count, count, dtype=torch.float64)
        for i in range(count):
            for j in range(i + 1):
                key = steps[j], steps[i]
                if key not in known:
                    known[key] = (flat[i].double() * flat[j].double()).sum(1).tolist()
                table[:, i, j] = table[:, j, i] = torch.tensor(known[key], dtype=torch.float64)
        state.products = known
        return table


@dataclass(frozen=True)
class DMD(FeatureMethod):
    """Forecast features with exponentials that are fitted to the last computed ones.

    Features that follow a linear equation are sums of damped and oscillating exponentials, of which
    polynomials are but the beginning. Reference: the `DMDCalibrator` of cache-dit (dynamic mode
    decomposition, Schmid 2010, doi 10.1017/S0022112010001217; for one exponential, Prony's method),
    its window of 6 and a line below 4 evenly spaced features. Differs: the fit is made from inner
    products, without a decomposition of whole features; the line is that through the last two
    features, where cache-dit 1.5 divides the change since the last but two by their distance.

    Args:
        every: Interval in steps; 1 turns the cache off.
        warmup: First steps that are always computed, at least 1.
        history: Features that are kept and fitted, at least 4.
        rank: Most exponentials, 0 for as many as there are above the noise.
        site: Site of the features, a `Site` or its name.
    """

    every: Spacing = 4
    warmup: Warmup = 4
    history: History = 6
    rank: Whole = 0
    site: Site | str = Site.STACK

    def parts(self) -> Combine:
        """Return one step in `every` after the warm-up, and the fitted exponentials."""
        return Combine(Every(self.every, self.warmup), Exponentials(self.history, self.rank), self.site)

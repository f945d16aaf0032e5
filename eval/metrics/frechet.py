"""The Fréchet distance of two feature sets, and its limit for many samples.

With Inception features this is FID (Heusel et al. 2017, arXiv 1706.08500, section 3), with I3D
features FVD; the features decide the name, the arithmetic is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

SIZES = 5
DRAWS = 8


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a feature set."""

    mean: Tensor  # float64 [D]
    cov: Tensor  # unbiased covariance (divided by count - 1), float64 [D, D]
    count: int  # samples that they were formed from

    def __post_init__(self) -> None:
        """Check shapes, dtypes and count."""
        dim = self.mean.numel()
        if self.mean.shape != (dim,) or self.cov.shape != (dim, dim):
            raise ValueError(
                f"mean {list(self.mean.shape)} and cov {list(self.cov.shape)} do not fit: expected [D] and [D, D]"
            )
        if self.mean.dtype != torch.float64 or self.cov.dtype != torch.float64:
            raise ValueError(f"moments must be float64, got mean {self.mean.dtype} and cov {self.cov.dtype}")
        if self.count < 2:
            raise ValueError(f"moments need two samples or more, got count={self.count}")


def moments(features: Tensor) -> Moments:
    """Return mean and unbiased covariance of features.

    They are [N, D], any float dtype, N at least 2.

    Raises:
        ValueError: If the shape is different or a value is not finite.
    """
    check_features(features, "features")
    features = features.to(torch.float64)
    mean = features.mean(dim=0)
    centered = features - mean
    return Moments(mean, centered.T @ centered / (len(features) - 1), len(features))


def frechet(a: Moments, b: Moments) -> float:
    """Return the squared Fréchet distance of two Gaussians.

    |m_a - m_b|^2 + tr(S_a) + tr(S_b) - 2 tr((S_a^(1/2) S_b S_a^(1/2))^(1/2)) (Dowson and Landau
    1982), at least 0, and exactly 0 for equal moments.

    Raises:
        ValueError: If the feature sizes differ.
    """
    check_same_size(a.mean, b.mean)
    if torch.equal(a.mean, b.mean) and torch.equal(a.cov, b.cov):
        return 0.0
    root = matrix_root(a.cov)
    product = torch.linalg.eigvalsh(root @ b.cov @ root)
    distance = (a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace()
    return max(0.0, float(distance - 2 * product.clamp(min=0).sqrt().sum()))


def at_infinity(fake_features: Tensor, reference: Moments, seed: int = 0) -> float:
    """Return the Fréchet distance extrapolated to infinitely many fake samples (FID_infinity).

    The distance grows with 1 / N, so a line through its means at five sizes, from N / 2 to N and evenly spaced
    in 1 / N, is read off at 0: Chong and Forsyth 2020, arXiv 1911.07023, section 4. Departures: random subsets
    of the features instead of quasi-random samples of the generator, and five sizes with eight draws each.
    Noise can make it slightly negative for equal distributions. The bias by the count of the reference stays
    in. Features are [N, D] with N / 2 > D: below that the distance is no line in 1 / N.

    Raises:
        ValueError: If there are too few features or sizes differ.
    """
    check_features(fake_features, "fake_features")
    total, dim = fake_features.shape
    check_same_size(fake_features[0], reference.mean)
    if total < 2 * (dim + 1):
        raise ValueError(f"{total} samples of {dim} features are too few to extrapolate: need {2 * (dim + 1)}")
    generator = torch.Generator().manual_seed(seed)
    inverse = torch.linspace(2 / total, 1 / total, SIZES, dtype=torch.float64)
    sizes = (1 / inverse).round().to(torch.int64)
    means = []
    for size in sizes.tolist():
        # All samples at once are one set, whatever the draw.
        draws = 1 if size == total else DRAWS
        distances = []
        for _ in range(draws):
            chosen = torch.randperm(total, generator=generator)[:size].to(fake_features.device)
            distances.append(frechet(moments(fake_features[chosen]), reference))
        means.append(fmean(distances))
    design = torch.stack([torch.ones(SIZES, dtype=torch.float64), 1 / sizes], dim=1)
    line = torch.linalg.lstsq(design, torch.tensor(means, dtype=torch.float64)[:, None])
    return float(line.solution[0])


def matrix_root(cov: Tensor) -> Tensor:
    """Return the symmetric root of a covariance, float64 [D, D]; eigenvalues below 0 count 0."""
    values, vectors = torch.linalg.eigh(cov)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def check_features(features: Tensor, name: str) -> None:
    """Raise ValueError unless features are a finite float [N, D] with N at least 2."""
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(f"{name} must be a float tensor [N, D], got {features.dtype} {list(features.shape)}")
    if len(features) < 2 or features.shape[1] == 0:
        raise ValueError(f"{name} need two samples or more, got shape {list(features.shape)}")
    if not bool(features.isfinite().all()):
        bad = int((~features.isfinite()).any(dim=1).sum())
        raise ValueError(f"{name} hold NaN or infinity in {bad} of {len(features)} rows")


def check_same_size(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless two feature vectors [D] have one size."""
    if a.shape != b.shape:
        raise ValueError(
            f"features of {a.numel()} and {b.numel()} values cannot be compared; use one extractor for both"
        )

"""The Fréchet distance, KID, Inception Score, precision and recall, density and coverage, from features.

The formulas are those of the papers; which extractor made the features decides the name: with Inception features the
Fréchet distance is FID (Heusel et al. 2017, arXiv 1706.08500, section 3), with I3D features FVD.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

DISTANCES_AT_ONCE = 2**22  # float64 values, 32 MiB
# Squared distances come from one matrix product, many times faster than differences for 2,048
# features. Its rounding is below SAME of the squared lengths, and TIE decides equal distances.
SAME, TIE = 1e-12, 1e-9


def kid(
    real: Tensor, fake: Tensor, subsets: int = 50, subset_size: int | None = None, seed: int = 0
) -> tuple[float, float]:
    """Return mean and standard deviation over subsets of the kernel distance (KID).

    The unbiased squared maximum mean discrepancy with the kernel (x.y / D + 1)^3: Bińkowski et al. 2018, arXiv
    1801.01401, section 4. Unbiased means that equal distributions give 0 on average, so single values can be negative.
    The kernel depends on the scale of the features. As in torchmetrics, the standard deviation is the population one,
    over subsets that overlap: it is no interval for the mean.

    Args:
        real: [N, D], any float dtype.
        fake: [M, D].
        subsets: Random subsets, drawn without replacement from each set.
        subset_size: Samples in each; the smaller of 1,000 and half the smaller set by default.
        seed: Seed of the subsets.

    Raises:
        ValueError: If shapes do not fit or subset_size is not in 2..min(N, M).
    """
    _check_sets(real, fake)
    smaller = min(len(real), len(fake))
    if subset_size is None and smaller < 4:
        raise ValueError(f"KID needs 4 samples or more, got {len(real)} real and {len(fake)} fake")
    size = min(1000, smaller // 2) if subset_size is None else subset_size
    if not 2 <= size <= smaller:
        raise ValueError(
            f"subset_size={size} must be in 2..{smaller} for {len(real)} real and {len(fake)} fake "
            "samples; use more samples or a smaller subset_size"
        )
    if subsets < 1:
        raise ValueError(f"subsets={subsets} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        draws = [torch.randperm(len(x), generator=generator)[:size] for x in (real, fake)]
        values.append(squared_mmd(real[draws[0].to(real.device)], fake[draws[1].to(fake.device)]))
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std(correction=0))


def squared_mmd(real: Tensor, fake: Tensor) -> float:
    """Return the unbiased squared maximum mean discrepancy with the kernel (x.y / D + 1)^3.

    Args:
        real: [N, D], N at least 2.
        fake: [M, D], M at least 2.

    Raises:
        ValueError: If shapes do not fit.
    """
    _check_sets(real, fake)
    x, y = real.to(torch.float64), fake.to(torch.float64)

    def kernel(left: Tensor, right: Tensor) -> Tensor:
        return (left @ right.T / left.shape[1] + 1) ** 3

    def mean_of_pairs(features: Tensor) -> Tensor:
        values = kernel(features, features)
        return (values.sum() - values.trace()) / (len(features) * (len(features) - 1))

    return float(mean_of_pairs(x) + mean_of_pairs(y) - 2 * kernel(x, y).mean())


def inception_score(probabilities: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Return mean and standard deviation over splits of exp(E KL(p(y|x) || p(y))).

    Salimans et al. 2016, arXiv 1606.03498, section 4. Between 1 (all samples alike, or the classifier undecided) and
    C. Low for small splits: below about 500 samples in a split p(y) follows its own samples, so compare scores of one
    N and one `splits` only. Samples are shuffled first, as in torchmetrics; split sizes differ by at most one.

    Args:
        probabilities: p(y|x), [N, C], rows summing to 1.
        splits: Parts that are scored on their own, 1..N.
        seed: Seed of the shuffling.

    Returns:
        Mean and sample standard deviation, dimensionless; the latter is 0 for one split.

    Raises:
        ValueError: If rows are no probabilities or splits is out of range.
    """
    check_features(probabilities, "probabilities")
    table = probabilities.to(torch.float64)
    if bool((table < 0).any()) or bool(((table.sum(dim=1) - 1).abs() > 1e-3).any()):
        raise ValueError("probabilities must be >= 0 with rows summing to 1; apply softmax first")
    if not 1 <= splits <= len(table):
        raise ValueError(f"splits={splits} must be in 1..{len(table)}, the number of samples")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    scores = torch.stack([_split_score(part) for part in table[order.to(table.device)].tensor_split(splits)])
    return float(scores.mean()), float(scores.std()) if splits > 1 else 0.0


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """Return the samples' values whose means are improved precision and recall, 0 or 1 each.

    Precision is the share of fake samples inside the manifold of the real ones (in the ball to the k-th neighbor of
    any), recall the share of real samples inside that of the fake ones: Kynkäänniemi et al. 2019, arXiv 1904.06991,
    section 2.

    Args:
        real: [N, D], any float dtype.
        fake: [M, D]. Values for different N or M are not comparable.
        k: Neighbor that sets the radius, not counting the sample itself.

    Returns:
        Whether each fake sample is in the real manifold, float64 [M], and whether each real sample is in the fake one,
        float64 [N].

    Raises:
        ValueError: If shapes do not fit or a set has no more than k samples.
    """
    _check_sets(real, fake)
    return _covered(fake, real, k), _covered(real, fake, k)


def density_coverage(real: Tensor, fake: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    """Return the samples' values whose means are density and coverage.

    Density is how many real balls (to the k-th real neighbor) hold a fake sample on average, divided by k; it can be
    above 1. Coverage is the share of real balls that hold a fake sample: Naeem et al. 2020, arXiv 2002.09797, section
    3. Balls are open, as in the official code: with closed ones equal sets would have (k + 1) / k.

    Args:
        real: [N, D], any float dtype.
        fake: [M, D]. Values for different N or M are not comparable.
        k: Neighbor that sets the radius, not counting the sample itself.

    Returns:
        Real balls around each fake sample divided by k, float64 [M], and whether each real ball holds a fake sample,
        float64 [N].

    Raises:
        ValueError: If shapes do not fit or `real` has no more than k samples.
    """
    _check_sets(real, fake)
    radii = _radii(real, k)
    balls = torch.zeros(len(fake), dtype=torch.float64, device=fake.device)
    held = []
    for start, distances in _distances(real, fake):
        inside = distances < radii[start : start + len(distances), None] * (1 - TIE)
        balls += inside.sum(dim=0)
        held.append(inside.any(dim=1))
    return balls / k, torch.cat(held).to(torch.float64)


def _covered(points: Tensor, centers: Tensor, k: int) -> Tensor:
    """Say which points lie in the closed ball of any center, 0 or 1, float64 [points]."""
    radii = _radii(centers, k) * (1 + TIE)
    parts = [(distances <= radii).any(dim=1) for _, distances in _distances(points, centers)]
    return torch.cat(parts).to(torch.float64)


def _radii(features: Tensor, k: int) -> Tensor:
    """Return every sample's squared distance to its k-th neighbor, float64 [N]."""
    if not 1 <= k < len(features):
        raise ValueError(f"k={k} must be in 1..{len(features) - 1}: there are {len(features)} samples")
    # The sample itself is its own nearest, at exactly 0.
    parts = [rows.kthvalue(k + 1, dim=1).values for _, rows in _distances(features, features)]
    return torch.cat(parts)


def _distances(rows: Tensor, columns: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, squared distances [some rows, columns]) in flat memory."""
    center = columns.to(torch.float64).mean(dim=0)
    left, right = rows.to(torch.float64) - center, columns.to(torch.float64) - center
    lengths = right.square().sum(dim=1)
    step = max(1, DISTANCES_AT_ONCE // len(columns))
    for start in range(0, len(left), step):
        part = left[start : start + step]
        sizes = part.square().sum(dim=1, keepdim=True) + lengths
        squared = sizes - 2 * part @ right.T
        yield start, squared.where(squared > SAME * sizes, 0)


def _split_score(table: Tensor) -> Tensor:
    marginal = table.mean(dim=0)
    divergence = (torch.xlogy(table, table) - torch.xlogy(table, marginal)).sum(dim=1)
    return divergence.mean().exp()


def _check_sets(real: Tensor, fake: Tensor) -> None:
    check_features(real, "real features")
    check_features(fake, "fake features")
    check_same_size(real[0], fake[0])


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

    Args:
        features: [N, D], any float dtype, N at least 2.

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

    |m_a - m_b|^2 + tr(S_a) + tr(S_b) - 2 tr((S_a^(1/2) S_b S_a^(1/2))^(1/2)) (Dowson and Landau 1982), at least 0, and
    exactly 0 for equal moments.

    Args:
        a: Moments of D features.
        b: Moments of D features.

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

    The distance grows with 1 / N, so a line through its means at five sizes, from N / 2 to N and evenly spaced in 1 /
    N, is read off at 0: Chong and Forsyth 2020, arXiv 1911.07023, section 4. Departures: random subsets of the
    features instead of quasi-random samples of the generator, and five sizes with eight draws each. Noise can make it
    slightly negative for equal distributions. The bias by the count of the reference stays in.

    Args:
        fake_features: [N, D] with N / 2 > D: below that the distance is no line in 1 / N.
        reference: Moments of the real features.
        seed: Seed of the draws.

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

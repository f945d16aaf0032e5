"""Intervals: how far a metric would move with other samples; of shares, of means and of Fréchet distances.

A share of outcomes has Wilson's interval (Wilson 1927), which stays within 0..1 and never has width zero. Outcomes
that come in clusters, such as several questions about one context, count as fewer (Korn and Graubard 1998): as many
independent ones as would have the spread of the cluster means.

Everything else has a bootstrap interval (Efron 1979), cut off where the metric ends: samples are drawn with
replacement and the statistic is taken again. It is centered: the spread of the resampled values is laid around the
point value, because a resampled Fréchet distance is larger on average than the point value, and a plain percentile
interval would miss it. The interval is for the expected value at this sample count; it says nothing about the bias
that a small count has. Near the floor, with few samples a feature, it is wider than needed (about twice at N = 4 D).
Changes are paired: both sides are resampled with the same sample ids.

Density, coverage, precision and recall are not to be recomputed on a resampling, whose repeated samples are neighbors
at distance 0; take `mean_interval` of their values per sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from diffcache.eval.metrics.distances import Moments, check_features, check_same_size, frechet, matrix_root, moments

RESAMPLES = 1000
LEVEL = 0.95
DRAWN_AT_ONCE = 2**22  # sample ids, 32 MiB
_UNBOUNDED = (-math.inf, math.inf)
_DISTANCE = (0.0, math.inf)


@dataclass(frozen=True)
class Interval:
    """A point value, low <= value <= high, with its interval and its n samples."""

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int]:
        """Return the fields as a dict for JSON."""
        return asdict(self)

    def excludes(self, value: float = 0.0) -> bool:
        """Say whether `value` lies outside: for a change and 0, whether the change is clear."""
        return not self.low <= value <= self.high


def mean_interval(
    values: Tensor, resamples: int = RESAMPLES, seed: int = 0, bounds: tuple[float, float] = _UNBOUNDED
) -> Interval:
    """Return the mean of one value a sample with its 95 % interval.

    Args:
        values: [N], N at least 2, any dtype.
        resamples: Resamplings.
        seed: Seed of the resampling.
        bounds: Least and most that a value can be; the interval ends there.

    Raises:
        ValueError: If the shape is different or a value is not finite.
    """
    table = _column(values, "values")
    _check_settings(len(table), resamples)
    blocks = _resampled_ids(len(table), resamples, seed)
    means = [mean for ids in blocks for mean in table[ids].mean(dim=1).tolist()]
    return _centered(float(table.mean()), means, len(table), bounds)


def frechet_interval(fake_features: Tensor, reference: Moments, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the Fréchet distance to a fixed reference with its 95 % interval.

    With D = 64 and 1,000 resamplings about 0.3 s on one core for 256 samples and 1 s for 2,000. It grows with D^3:
    with 2,048 features each takes seconds, so lower `resamples` or use a GPU.

    Args:
        fake_features: [N, D], any float dtype.
        reference: Moments of the real features, taken as exact.
        resamples: Resamplings.
        seed: Seed of the resampling.

    Raises:
        ValueError: If shapes do not fit or a number is out of range.
    """
    distance = _Resampled(fake_features, reference)
    weights = _weights(fake_features, resamples, seed)
    drawn = [distance(w) for w in weights]
    value = frechet(moments(fake_features), reference)
    return _centered(value, drawn, len(fake_features), _DISTANCE)


def frechet_change(
    a_features: Tensor, b_features: Tensor, reference: Moments, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the Fréchet distance of b minus that of a, with a paired 95 % interval.

    Row i of both must be the same prompt and seed: most of the noise of the two distances is then the same and
    cancels, so that far smaller changes are seen than by comparing two intervals.

    Args:
        a_features: The baseline, [N, D], any float dtype.
        b_features: The same samples made otherwise, [N, D].
        reference: Moments of the real features, taken as exact.
        resamples: Resamplings.
        seed: Seed of the resampling.

    Raises:
        ValueError: If shapes do not fit or a number is out of range.
    """
    _check_pairs(a_features, b_features)
    of_a, of_b = _Resampled(a_features, reference), _Resampled(b_features, reference)
    drawn = [of_b(w) - of_a(w) for w in _weights(a_features, resamples, seed)]
    point = frechet(moments(b_features), reference) - frechet(moments(a_features), reference)
    return _centered(point, drawn, len(a_features), _UNBOUNDED)


def frechet_between(a_features: Tensor, b_features: Tensor, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the Fréchet distance of two paired sets to each other, with a paired 95 % interval.

    Exactly 0 for equal features, and far below the floor of unpaired sets for similar ones.

    Args:
        a_features: [N, D], any float dtype.
        b_features: The same samples made otherwise, [N, D].
        resamples: Resamplings.
        seed: Seed of the resampling.

    Raises:
        ValueError: If shapes do not fit or a number is out of range.
    """
    _check_pairs(a_features, b_features)
    center = a_features.to(torch.float64).mean(dim=0)
    a, b = (x.to(torch.float64) - center for x in (a_features, b_features))
    weights = _weights(a, resamples, seed)
    drawn = [frechet(_weighted_moments(a, w), _weighted_moments(b, w)) for w in weights]
    return _centered(frechet(moments(a), moments(b)), drawn, len(a), _DISTANCE)


class _Resampled:
    """The Fréchet distance of weighted features to a reference, prepared for many weights.

    With R the root of the reference's covariance, R S R is the covariance of the features times R.
    """

    def __init__(self, features: Tensor, reference: Moments) -> None:
        check_features(features, "features")
        check_same_size(features[0], reference.mean)
        # Around the reference's mean the squares that are subtracted below stay small.
        self.offset = features.to(torch.float64) - reference.mean
        self.turned = self.offset @ matrix_root(reference.cov)
        self.squares = self.offset.square().sum(dim=1)
        self.trace = reference.cov.trace()

    def __call__(self, weights: Tensor) -> float:
        n = len(weights)
        shift = (weights @ self.offset / n).square().sum()
        trace = (weights @ self.squares - n * shift) / (n - 1)
        product = torch.linalg.eigvalsh(_weighted_moments(self.turned, weights).cov)
        overlap = product.clamp(min=0).sqrt().sum()
        return max(0.0, float(shift + trace + self.trace - 2 * overlap))


def _weighted_moments(features: Tensor, weights: Tensor) -> Moments:
    """Return the moments of features where row i occurs weights[i] times."""
    n = len(weights)
    mean = weights @ features / n
    spread = features.T @ (features * weights[:, None]) - n * torch.outer(mean, mean)
    return Moments(mean, spread / (n - 1), n)


def _resampled_ids(n: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield blocks of sample ids, int64 [some resamples, n], drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    step = max(1, DRAWN_AT_ONCE // n)
    for start in range(0, resamples, step):
        yield torch.randint(n, (min(step, resamples - start), n), generator=generator)


def _weights(features: Tensor, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield how often each sample was drawn, float64 [n], one resampling at a time."""
    n = len(features)
    _check_settings(n, resamples)
    for block in _resampled_ids(n, resamples, seed):
        for ids in block:
            yield torch.bincount(ids, minlength=n).to(features.device, torch.float64)


def _centered(value: float, drawn: list[float], n: int, bounds: tuple[float, float]) -> Interval:
    """Lay the spread of the resampled values around the point value, within the bounds."""
    found = torch.tensor(drawn, dtype=torch.float64)
    if not (math.isfinite(value) and bool(found.isfinite().all())):
        raise ValueError("the statistic is NaN or infinite for these samples or a resampling of them")
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = (torch.quantile(found, tails) - found.mean()).tolist()
    # The mean of a very skewed sample can lie outside its quantiles.
    ends = (max(value + min(0.0, low), bounds[0]), min(value + max(0.0, high), bounds[1]))
    return Interval(value, min(ends[0], value), max(ends[1], value), n)


def _column(values: Tensor, name: str) -> Tensor:
    """Return values as float64 [N] on the CPU, checked."""
    if values.ndim != 1:
        raise ValueError(f"{name} must hold one value a sample, [N], got {list(values.shape)}")
    table = values.detach().to("cpu", torch.float64)
    bad = int((~table.isfinite()).sum())
    if bad:
        raise ValueError(f"{name} hold NaN or infinity in {bad} of {len(table)} samples")
    return table


def _check_pairs(a: Tensor, b: Tensor) -> None:
    check_features(a, "a_features")
    check_features(b, "b_features")
    check_same_size(a[0], b[0])
    if len(a) != len(b):
        raise ValueError(f"{len(a)} samples against {len(b)}; paired sets need the same prompts and seeds")


def _check_settings(n: int, resamples: int) -> None:
    if n < 2:
        raise ValueError(f"an interval needs two samples or more, got {n}")
    if resamples < 2:
        raise ValueError(f"resamples={resamples} must be at least 2")


# Metrics that are means of outcomes in 0..1, and the least and most that others can be; `_lite`
# ones as those they stand in for.
_SHARES = ("precision", "recall", "coverage", "exact_match")
_BOUNDS = {
    "psnr_db": (0.0, 100.0),
    "ssim": (-1.0, 1.0),
    "ms_ssim": (0.0, 1.0),
    "lpips": (0.0, math.inf),
    "temporal_error": (0.0, 2.0),
    "temporal_flickering": (0.0, 1.0),
    "density": (0.0, math.inf),
    "clip_score": (-100.0, 100.0),
}


def share_interval(hits: Tensor) -> Interval:
    """Return a share of outcomes with Wilson's 95 % interval.

    Outcomes that are all equal say nothing about clusters, so they count as independent.

    Args:
        hits: Outcomes in 0..1, [N] of independent samples, or [N, Q] of N clusters (contexts, prompts) with Q outcomes
            each; bool, or any number dtype.

    Returns:
        The mean of all outcomes and its interval; `n` is the number N of samples or clusters.

    Raises:
        ValueError: If there are no outcomes, the shape is another, or one is not in 0..1.
    """
    if hits.ndim not in (1, 2) or hits.numel() == 0:
        raise ValueError(f"hits of shape {list(hits.shape)}: must be [N] or [N, Q], not empty")
    table = hits.detach().to("cpu", torch.float64).reshape(len(hits), -1)
    outside = int((~((table >= 0) & (table <= 1))).sum())
    if outside:
        raise ValueError(f"hits: {outside} of {table.numel()} outcomes are not within 0..1")
    share, count = float(table.mean()), _independent(table)
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = share * (1 - share) / count + (z / (2 * count)) ** 2
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(share, min(low, share), max(high, share), len(table))


def is_wilson(value: float, low: float | None, high: float | None) -> bool:
    """Return whether an interval of a share is Wilson's, for some number of outcomes.

    Its ends are the shares x with (value - x)^2 = z^2 x (1 - x) / n; both must have one n.
    """
    if low is None or high is None or not 0 <= low < high <= 1:
        return False
    worth = [x * (1 - x) / (value - x) ** 2 for x in (low, high) if x != value]
    return math.isclose(worth[0], worth[-1], rel_tol=1e-6)


def _independent(table: Tensor) -> float:
    """Return how many independent outcomes are worth as much as these, float64 [N, Q]."""
    share, count = float(table.mean()), table.numel()
    variance = float(table.mean(dim=1).var()) / len(table) if len(table) > 1 else 0.0
    if variance == 0 or not 0 < share < 1:
        return float(count)
    # The variance of a mean of `count` independent outcomes, over that of these.
    worth = count * (share * (1 - share) / max(count - 1, 1)) / variance
    # Clusters that happen to be alike are worth no more than their outcomes. Outcomes that are
    # shares themselves are: each is a mean of several.
    are_whole = bool(((table == 0) | (table == 1)).all())
    return min(worth, float(count)) if are_whole else worth


def share_change(before: Tensor, after: Tensor) -> Interval:
    """Return how much larger a share of the same samples' outcomes became, with its 95 % interval.

    Two pairs more, one that changed each way, keep the interval from having width zero where no outcome changed
    (Bonett and Price 2012, doi 10.3102/1076998611411915). Beside [N, Q] they are whole clusters (ours), so that the
    interval is wider than it need be where clusters are few.

    Args:
        before: Outcomes in 0..1, [N] or [N, Q] as in `share_interval`.
        after: Outcomes of the same samples, of the same shape.

    Raises:
        ValueError: If shapes differ, or as in `share_interval`.
    """
    if before.shape != after.shape:
        raise ValueError(
            f"outcomes of shape {list(before.shape)} and {list(after.shape)}: a paired change needs the same samples"
        )
    one, other = share_interval(before), share_interval(after)
    change = (after.double() - before.double()).reshape(len(before), -1).mean(dim=1).cpu()
    table = torch.cat([change, torch.tensor([1.0, -1.0], dtype=torch.float64)])
    middle, spread = float(table.mean()), float(table.std(correction=0)) / math.sqrt(len(table))
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * spread
    value = other.value - one.value
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return Interval(value, min(low, value), max(high, value), len(change))


def metric_interval(key: str, values: Tensor, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the mean of a metric's values with an interval within the metric's range.

    Args:
        key: Name of the metric in `diffcache.eval.metrics.definitions`.
        values: One value a sample, [N]; at least 2 where the metric is no share.
        resamples: Resamplings.
        seed: Seed of the resampling.

    Raises:
        ValueError: If the shape is different, or a value is not finite or out of range.
    """
    base = key.removesuffix("_lite")
    if base in _SHARES:
        return share_interval(values)
    bounds = _BOUNDS.get(base, (-math.inf, math.inf))
    return mean_interval(values, resamples, seed=seed, bounds=bounds)

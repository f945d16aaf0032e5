"""Intervals that keep to the range of their quantity: of shares, and of a metric by its key.

A share of outcomes has Wilson's interval (Wilson 1927), which stays within 0..1 and never has width
zero. Outcomes that come in clusters, such as several questions about one context, count as fewer
(Korn and Graubard 1998): as many independent ones as would have the spread of the cluster means.
Everything else has a bootstrap interval that is cut off where the metric ends.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from diffcache.eval.metrics.bootstrap import LEVEL, RESAMPLES, Interval, mean_interval

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

    Outcomes that are all equal say nothing about clusters, so they count as independent. Outcomes in 0..1 are
    [N] of independent samples, or [N, Q] of N clusters (contexts, prompts) with Q outcomes each; bool, or any
    number dtype.

    Returns:
        The mean of all outcomes, its interval, and the number N of samples or clusters.

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
    (Bonett and Price 2012, doi 10.3102/1076998611411915). Both are outcomes of the same samples in 0..1, [N] or
    [N, Q] as in `share_interval`.

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

    The key is one of `diffcache.eval.metrics.catalog`; values are [N], at least 2 where the metric is no share.

    Raises:
        ValueError: If the shape is different, or a value is not finite or out of range.
    """
    base = key.removesuffix("_lite")
    if base in _SHARES:
        return share_interval(values)
    bounds = _BOUNDS.get(base, (-math.inf, math.inf))
    return mean_interval(values, resamples, seed=seed, bounds=bounds)

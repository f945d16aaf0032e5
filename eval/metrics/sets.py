"""Compare two sets of features: the Fréchet distance with interval and floor, KID, and others; quality of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.metrics import distances, intervals, reward
from diffcache.eval.metrics.definitions import METRICS
from diffcache.eval.metrics.distances import Moments, at_infinity, frechet, moments
from diffcache.eval.metrics.intervals import metric_interval
from diffcache.eval.runs.extractors import Columns

_WIDE = 256  # features; above it one Fréchet distance takes seconds, so there is no interval
MOST_NEIGHBORS = 2000  # samples; every one is compared with every other
SPLITS = 10
_DRAWS, _DRAWS_WIDE = 8, 2
_LEAST_FOR_FLOOR = 4


@dataclass(frozen=True)
class FeatureSet:
    """The features of one set."""

    moments: Moments  # mean and covariance; from `features` where those are known
    count: int | None  # samples, None where nobody says
    features: Tensor | None = None  # float64 [N, D], None where only the moments are known
    probabilities: Tensor | None = None  # probabilities of classes, [N, C], for the Inception score


@dataclass(frozen=True)
class Wanted:
    """Choice of metrics beside the Fréchet distance, and their settings."""

    kid: bool = False  # kernel distance
    prdc: bool = False  # precision, recall, density, coverage
    inception_score: bool = False  # whether the Inception score of the second set is computed
    resamples: int = intervals.RESAMPLES  # number of resamples for intervals, 0 for none
    seed: int = 0  # seed of every draw


def compare(real: FeatureSet, fake: FeatureSet, wanted: Wanted) -> dict[str, dict[str, Any]]:
    """Return the metrics of a set against a reference.

    The features of `fake` must be known.

    Returns:
        `fid`, and as wanted `kid`, `is`, `precision`, `recall`, `density`, `coverage`. Each has
        `value` and `n`; `low` and `high` are a 95 % interval, `spread` a standard deviation over
        subsets or splits, `floor` what `floor` returns (of `fid`).

    Raises:
        ValueError: If there are too few samples, or features where they are needed are not known.
    """
    if fake.features is None:
        raise ValueError("the features of the second set must be known, not only their moments")
    found = {"fid": _frechet(fake.features, real.moments, wanted.resamples, wanted.seed)}
    found["fid"]["floor"] = floor(real, fake, wanted.seed)
    if wanted.kid or wanted.prdc:
        if real.features is None:
            raise ValueError(
                "KID, precision, recall, density and coverage need the pictures of the reference, "
                "not only its mean and covariance"
            )
        if wanted.kid:
            found["kid"] = kernel_distance(real.features, fake.features, wanted.seed)
        if wanted.prdc:
            found |= neighbors(real.features, fake.features, wanted.resamples, wanted.seed)
    if wanted.inception_score:
        if fake.probabilities is None:
            raise ValueError("the Inception score needs the class probabilities of the second set")
        score = distances.inception_score(fake.probabilities, SPLITS, wanted.seed)
        found["is"] = mean_and_spread(score, len(fake.probabilities))
    return found


def floor(real: FeatureSet, fake: FeatureSet, seed: int = 0) -> float | None:
    """Return how far apart two sets of these sizes are if both are drawn from one distribution.

    Measured between disjoint parts of the reference, one as large as the other set where there is enough, and
    carried over to the sizes in question: the distance falls as 1/N + 1/M. That holds within a few per cent from
    twice as many samples as features. Of a reference whose moments alone are known, parts of the other set are
    taken. Fewer than four samples have none (None).
    """
    source = fake.features if real.features is None else real.features
    if source is None or len(source) < _LEAST_FOR_FLOOR:
        return None
    one = len(source) // 2 if fake.count is None else min(fake.count, len(source) // 2)
    sizes = (one, len(source) - one)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(_DRAWS_WIDE if source.shape[1] > _WIDE else _DRAWS):
        order = torch.randperm(len(source), generator=generator)
        parts = (moments(source[ids]) for ids in (order[:one], order[one:]))
        found.append(frechet(*parts))
    measured = sum(1 / size for size in sizes)
    asked = sum(1 / s.count for s in (real, fake) if s.count is not None)
    return fmean(found) * asked / measured


def _frechet(features: Tensor, real: Moments, resamples: int, seed: int = 0) -> dict[str, Any]:
    """Return the distance of features to real ones, with its interval if there are resamples."""
    if not resamples:
        return {"value": frechet(moments(features), real), "n": len(features)}
    return intervals.frechet_interval(features, real, resamples, seed=seed).to_dict()


def kernel_distance(real: Tensor, fake: Tensor, seed: int = 0) -> dict[str, Any]:
    """Return KID (or KVD) between some of each set, with its spread over subsets.

    Features are float64 [N, D] and [M, D].
    """
    one, other = some(real, seed), some(fake, seed)
    found = mean_and_spread(distances.kid(one, other, seed=seed), len(other))
    return found | _drawn(one, other, seed)


def neighbors(
    real: Tensor, fake: Tensor, resamples: int = intervals.RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return precision, recall, density and coverage between some of each set, with intervals.

    Features are float64 [N, D] and [M, D]; 0 resamples give no intervals.
    """
    one, other = some(real, seed), some(fake, seed)
    precision, recall = distances.precision_recall(one, other)
    density, coverage = distances.density_coverage(one, other)
    columns = {"precision": precision, "recall": recall, "density": density, "coverage": coverage}
    found: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        found[name] = interval(name, column, resamples, seed) | _drawn(one, other, seed)
    return found


def some(features: Tensor, seed: int = 0) -> Tensor:
    """Return all features, or as many as neighbors are searched among, drawn at random."""
    if len(features) <= MOST_NEIGHBORS:
        return features
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    return features[order[:MOST_NEIGHBORS]]


def mean_and_spread(pair: tuple[float, float], count: int) -> dict[str, Any]:
    """Return a mean and a standard deviation over parts, as a record holds them."""
    return {"value": pair[0], "spread": pair[1], "n": count}


def _drawn(real: Tensor, fake: Tensor, seed: int) -> dict[str, Any]:
    return {"drawn": {"real": len(real), "fake": len(fake), "seed": seed}}


_FEWEST_FOR_SETS = 32  # samples below which distances of sets say nothing
_OF_SAMPLES = ("clip_score", *reward.NAMES.values())


@dataclass(frozen=True)
class Reference:
    """Real samples that generated ones are compared with."""

    name: str  # name of the place they are from
    # Ending of the keys (`_lite`, or "" for real networks) -> moments of all features, and some features [M, D]
    # (None: only moments are known)
    sets: Mapping[str, tuple[Moments, Tensor | None]]


def interval(key: str, column: Tensor, resamples: int = intervals.RESAMPLES, seed: int = 0) -> dict[str, Any]:
    """Return the mean of a metric with its interval; the value alone of a single sample, and of no resamples."""
    if len(column) < 2 or not resamples:
        return {"value": float(column.mean()), "n": len(column)}
    return metric_interval(key, column, resamples, seed).to_dict()


def summarized(key: str, column: Tensor, *drawn: int) -> dict[str, Any]:
    """Return what `interval` does, and where the worst 5 % begin: `p95`, or `p5` where more is better."""
    tail = 0.95 if METRICS[key].direction == "down" else 0.05
    return interval(key, column, *drawn) | {f"p{100 * tail:.0f}": float(torch.quantile(column, tail))}


def quality(mine: Columns, uncached: Columns, reference: Reference | None, is_film: bool) -> dict[str, Any]:
    """Return how good the samples of a case are, with intervals.

    `mine` and `uncached` are values of samples; the very same object for the uncached case itself.
    """
    found: dict[str, Any] = {}
    for name in (*_OF_SAMPLES, *(key for key in mine if key.startswith(reward.OWN))):
        if name in mine:
            column = mine[name].double()
            found[name] = interval(name, column)
            if mine is not uncached:
                change = interval(f"{name}_change", column - uncached[name].double())
                found[f"{name}_change"] = {**change, "paired": True}
    for ending in ("_lite", ""):
        if f"features{ending}" in mine and len(mine[f"features{ending}"]) >= _FEWEST_FOR_SETS:
            found |= _sets(mine, uncached, reference, ("fvd" if is_film else "fid", ending))
    return found


def _sets(mine: Columns, uncached: Columns, reference: Reference | None, key: tuple[str, str]) -> dict[str, Any]:
    """Compare features as sets: with the uncached ones, and with real ones."""
    distance, ending = key
    found: dict[str, Any] = {}
    features = mine[f"features{ending}"].double()
    base = uncached[f"features{ending}"].double()
    if f"probabilities{ending}" in mine:
        score = distances.inception_score(mine[f"probabilities{ending}"].double())
        found[f"is{ending}"] = mean_and_spread(score, len(features))
    if reference is not None and ending in reference.sets:
        real, some = reference.sets[ending]
        found |= _against(features, base if mine is not uncached else None, real, distance + ending)
        if some is not None:
            mine_set = FeatureSet(moments(features), len(features), features)
            equal = floor(FeatureSet(real, real.count, some.double()), mine_set)
            found[distance + ending]["floor"] = equal
            kernel = "kid" if distance == "fid" else "kvd"
            found[f"{kernel}{ending}"] = kernel_distance(some.double(), features)
            near = neighbors(some.double(), features)
            found |= {f"{name}{ending}": entry for name, entry in near.items()}
    if mine is not uncached:
        name = f"{distance}{ending}_to_uncached"
        if features.shape[1] <= _WIDE:
            found[name] = intervals.frechet_between(base, features).to_dict()
        else:
            found[name] = {"value": frechet(moments(base), moments(features)), "n": len(features)}
    return found


def _against(features: Tensor, base: Tensor | None, real: Moments, key: str) -> dict[str, Any]:
    """Return the distance to real samples, and its change from the uncached ones (`base`)."""
    is_wide = features.shape[1] > _WIDE
    found = {key: _frechet(features, real, 0 if is_wide else intervals.RESAMPLES)}
    if not is_wide and len(features) >= 4 * features.shape[1]:
        found[key]["at_infinity"] = at_infinity(features, real)
    if base is not None and is_wide:
        change = found[key]["value"] - frechet(moments(base), real)
        found[f"{key}_change"] = {"value": change, "n": len(features), "paired": True}
    elif base is not None:
        found[f"{key}_change"] = {**intervals.frechet_change(base, features, real).to_dict(), "paired": True}
    return found

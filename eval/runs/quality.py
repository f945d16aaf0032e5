"""Quality of the samples of a case: means over samples, and distances of sets, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diffcache.eval.metrics import bootstrap, distances, reward
from diffcache.eval.metrics.frechet import Moments, at_infinity, frechet, moments
from diffcache.eval.metrics.intervals import metric_interval
from diffcache.eval.metrics.sets import FeatureSet, floor, kernel_distance, mean_and_spread, neighbors
from diffcache.eval.runs.extractors import Columns

_FEWEST_FOR_SETS = 32  # samples below which distances of sets say nothing
_WIDEST = 256  # features; a resampling of wider ones takes seconds, so there is no interval
_OF_SAMPLES = ("clip_score", *reward.NAMES.values())


@dataclass(frozen=True)
class Reference:
    """Real samples that generated ones are compared with."""

    name: str  # name of the place they are from
    # Ending of the keys (`_lite`, or "" for real networks) -> moments of all features, and some features [M, D]
    # (None: only moments are known)
    sets: Mapping[str, tuple[Moments, Tensor | None]]


def interval(key: str, column: Tensor) -> dict[str, Any]:
    """Return the mean of a metric with its interval; of a single sample, the value alone."""
    if len(column) < 2:
        return {"value": float(column), "n": 1}
    return metric_interval(key, column).to_dict()


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
        if features.shape[1] <= _WIDEST:
            found[name] = bootstrap.frechet_between(base, features).to_dict()
        else:
            found[name] = {"value": frechet(moments(base), moments(features)), "n": len(features)}
    return found


def _against(features: Tensor, base: Tensor | None, real: Moments, key: str) -> dict[str, Any]:
    """Return the distance to real samples, and its change from the uncached ones (`base`)."""
    if features.shape[1] > _WIDEST:
        value = frechet(moments(features), real)
        found = {key: {"value": value, "n": len(features)}}
        if base is not None:
            change = value - frechet(moments(base), real)
            found[f"{key}_change"] = {"value": change, "n": len(features), "paired": True}
        return found
    found = {key: bootstrap.frechet_interval(features, real).to_dict()}
    if len(features) >= 4 * features.shape[1]:
        found[key]["at_infinity"] = at_infinity(features, real)
    if base is not None:
        changed = bootstrap.frechet_change(base, features, real)
        found[f"{key}_change"] = {**changed.to_dict(), "paired": True}
    return found

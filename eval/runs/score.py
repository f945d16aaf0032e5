"""Measure the samples of a case: how close they are to the uncached ones, and how good.

Per-sample values are computed once and kept beside the samples, under a key that changes with
the samples, the extractor and the definition; intervals are taken from them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffcache.eval.metrics import bootstrap, distances, pixels
from diffcache.eval.metrics.frechet import Moments, at_infinity, frechet, moments
from diffcache.eval.runs.extractors import Columns, Extractors
from diffcache.eval.runs.folder import CaseFolder
from diffcache.eval.runs.task import digest

DEFINITION = 1  # of the values kept beside samples; a change of a metric's definition raises it
_AT_ONCE = 64
_SHOWN = 8  # samples named as worst, median and best
_FEWEST_FOR_SETS = 32  # samples below which distances of sets say nothing
_SMALLEST_FOR_SCALES = 22  # pixels; MS-SSIM needs two scales
_WIDEST = 256  # features; a resampling of wider ones takes seconds, so there is no interval
_LOW_IS_GOOD = ("lpips", "lpips_lite", "temporal_error")
_OF_SAMPLES = ("prompt_accuracy", "clip_score_lite", "clip_score", "image_reward")


@dataclass(frozen=True)
class Reference:
    """Real samples that generated ones are compared with.

    Attributes:
        name: Where they are from.
        sets: Ending of the keys (`_lite`, or "" for real networks) -> moments of all features,
            and some features [M, D] (None: only moments are known).
    """

    name: str
    sets: Mapping[str, tuple[Moments, Tensor | None]]

    @property
    def identity(self) -> list[Any]:
        """What changes when the reference does."""
        return [self.name, {k: float(m.mean.sum()) for k, (m, _) in self.sets.items()}]


@dataclass(frozen=True)
class Samples:
    """The samples of a case, complete.

    Attributes:
        folder: Where they are.
        ids: All of them, in order.
        prompts: One for each.
        content: Changes with any file.
    """

    folder: CaseFolder
    ids: tuple[int, ...]
    prompts: tuple[str, ...]
    content: str

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
        """Yield (prompts, samples) in batches that fit into memory."""
        for start in range(0, len(self.ids), _AT_ONCE):
            chosen = slice(start, start + _AT_ONCE)
            yield self.prompts[chosen], self.folder.read(self.ids[chosen])


def kept(path: Path, key: str, compute: Callable[[], Columns]) -> Columns:
    """Return the columns that a file keeps under this key, else compute and keep them."""
    if path.exists():
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("key") == key:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {name: column.contiguous() for name, column in compute().items()}
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(found, beside, {"key": key})
    os.replace(beside, path)
    return found


def fidelity_values(samples: Samples, uncached: Samples, extractors: Extractors) -> Columns:
    """Return per-sample closeness to the uncached samples; films are means over their frames.

    Returns:
        Float64 [N] each: `psnr_db`, `mse` (full range is 1), `ssim`, `ms_ssim` where the pictures
        are large enough, `lpips_lite`, `lpips` where its weights are; for films `temporal_error`.
    """

    def compute() -> Columns:
        parts: list[Columns] = []
        for (_, mine), (_, theirs) in zip(samples, uncached, strict=True):
            if theirs[0].ndim == 3:
                parts.append(_pairs(torch.stack(theirs), torch.stack(mine), extractors))
            else:
                films = zip(theirs, mine, strict=True)
                parts += [_film_pair(one, other, extractors) for one, other in films]
        return _joined(parts)

    key = digest([DEFINITION, samples.content, uncached.content, extractors.identity])
    return kept(samples.folder.path / "fidelity.safetensors", key, compute)


def _pairs(theirs: Tensor, mine: Tensor, extractors: Extractors) -> Columns:
    found = {
        "psnr_db": pixels.psnr(theirs, mine),
        "mse": ((theirs.double() - mine.double()) / 255).square().mean(dim=(1, 2, 3)),
        "ssim": pixels.ssim(theirs, mine),
        **extractors.of_pairs(theirs, mine),
    }
    if min(theirs.shape[-2:]) >= _SMALLEST_FOR_SCALES:
        found["ms_ssim"] = pixels.ms_ssim(theirs, mine)
    return {name: column.double() for name, column in found.items()}


def _film_pair(theirs: Tensor, mine: Tensor, extractors: Extractors) -> Columns:
    found = {k: v.mean()[None] for k, v in _pairs(theirs, mine, extractors).items()}
    change = pixels.temporal_error(theirs, mine)
    return {**found, "temporal_error": torch.tensor([change], dtype=torch.float64)}


def quality_values(samples: Samples, extractors: Extractors) -> Columns:
    """Return what the extractors say of every sample by itself."""

    def compute() -> Columns:
        parts = []
        for prompts, found in samples:
            if found[0].ndim == 4:
                parts.append(extractors.of_films(found))
            else:
                parts.append(extractors.of_pictures(torch.stack(found), prompts))
        return _joined(parts)

    key = digest([DEFINITION, samples.content, samples.prompts, extractors.identity])
    return kept(samples.folder.path / "quality.safetensors", key, compute)


def _joined(parts: Sequence[Columns]) -> Columns:
    """Join columns; one that any part lacks (a prompt in other words) is left out."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def fidelity(values: Columns, ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return intervals of the per-sample values, and the worst and best samples by LPIPS."""
    found: dict[str, Any] = {}
    for name, column in values.items():
        if name == "mse":
            continue
        is_good_low = name in _LOW_IS_GOOD
        tail = torch.quantile(column, 0.95 if is_good_low else 0.05)
        found[name] = _interval(column)
        found[name]["p95" if is_good_low else "p5"] = float(tail)
    found["psnr_db"]["pooled"] = _decibels(float(values["mse"].mean()))
    distance = values.get("lpips", values["lpips_lite"]).tolist()
    order = sorted(range(len(ids)), key=lambda place: (distance[place], place))
    ranked = [ids[place] for place in order]
    middle = ranked[max(len(ranked) // 2 - _SHOWN // 2, 0) :][:_SHOWN]
    picked = {"worst": ranked[::-1][:_SHOWN], "median": middle, "best": ranked[:_SHOWN]}
    return found, {"count": len(ids), **picked}


def quality(
    mine: Columns, uncached: Columns, reference: Reference | None, is_film: bool
) -> dict[str, Any]:
    """Return how good the samples of a case are, with intervals.

    Args:
        mine: `quality_values` of the case.
        uncached: The same of the uncached case; the very object for that case itself.
        reference: Real samples, None where there are none.
        is_film: Whether the samples are films.
    """
    found: dict[str, Any] = {}
    for name in _OF_SAMPLES:
        if name in mine:
            column = mine[name].double()
            found[name] = _interval(column)
            if mine is not uncached:
                change = column - uncached[name].double()
                found[f"{name}_change"] = {**_interval(change), "paired": True}
    for ending in ("_lite", ""):
        if f"features{ending}" in mine and len(mine[f"features{ending}"]) >= _FEWEST_FOR_SETS:
            found |= _sets(mine, uncached, reference, ("fvd" if is_film else "fid", ending))
    return found


def _sets(
    mine: Columns, uncached: Columns, reference: Reference | None, key: tuple[str, str]
) -> dict[str, Any]:
    """Compare features as sets: with the uncached ones, and with real ones."""
    distance, ending = key
    found: dict[str, Any] = {}
    features = mine[f"features{ending}"].double()
    base = uncached[f"features{ending}"].double()
    if f"probabilities{ending}" in mine:
        score = distances.inception_score(mine[f"probabilities{ending}"].double())
        found[f"is{ending}"] = _mean_and_spread(score, len(features))
    if reference is not None and ending in reference.sets:
        real, some = reference.sets[ending]
        found |= _against(features, base if mine is not uncached else None, real, distance + ending)
        if some is not None:
            found[distance + ending]["floor"] = _floor(some.double(), real, len(features))
            found |= _neighbours(features, some.double(), distance, ending)
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


def _floor(some: Tensor, real: Moments, count: int) -> float:
    """Return how far real samples are from the reference when there are only so many of them.

    Beyond the features at hand the distance is taken to fall with 1 / N, as it does.
    """
    size = min(count, len(some) // 2)
    order = torch.randperm(len(some), generator=torch.Generator().manual_seed(0))
    parts = [order[:size], order[size : 2 * size]]
    distances = [frechet(moments(some[part]), real) for part in parts]
    return fmean(distances) * size / count


def _neighbours(features: Tensor, real: Tensor, distance: str, ending: str) -> dict[str, Any]:
    """Return KID, precision, recall, density and coverage."""
    found: dict[str, Any] = {}
    if distance == "fid":
        score = distances.kid(real, features)
        found[f"kid{ending}"] = _mean_and_spread(score, len(features))
    precision, recall = distances.precision_recall_values(real, features)
    density, coverage = distances.density_coverage_values(real, features)
    values = {"precision": precision, "recall": recall, "density": density, "coverage": coverage}
    return found | {f"{name}{ending}": _interval(column) for name, column in values.items()}


def _interval(column: Tensor) -> dict[str, Any]:
    """Return the mean with its interval; of a single sample, the value alone."""
    if len(column) < 2:
        return {"value": float(column), "n": 1}
    return bootstrap.mean_interval(column).to_dict()


def _decibels(error: float) -> float:
    """Return the PSNR of a mean squared error of full range 1, at most 100 dB."""
    return -10 * math.log10(max(error, pixels.SMALLEST_ERROR))


def _mean_and_spread(pair: tuple[float, float], count: int) -> dict[str, Any]:
    return {"value": pair[0], "spread": pair[1], "n": count}

"""Facts in the lines of a manifest: the computed steps of a case, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def evaluations(lines: Sequence[Mapping[str, Any]], steps: int, full: float | None) -> float:
    """Return how many full steps cost as much as a run, as a mean over samples.

    Counted in FLOPs of the whole denoiser; where they are unknown, computed steps are counted.

    Args:
        lines: Lines of the case's manifest.
        steps: Sampling steps.
        full: FLOPs of one uncached step and sample.
    """
    total = weight = 0.0
    for line in lines:
        count, cache = len(line["ids"]), line.get("cache")
        if cache is None:
            here = float(steps)
        elif full is None or cache["flops_saved"] is None:
            here = steps * fmean(computed for _, computed in cache["steps"])
        else:  # solvers of higher order call the denoiser more often than there are steps
            calls = len(cache["steps"])
            here = steps * (1 - cache["flops_saved"] / (full * count * calls))
        total, weight = total + here * count, weight + count
    return total / weight


def shares(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return for every step the share of samples that computed it, None without a cache.

    Args:
        lines: Lines of a case's manifest.
    """
    runs = [(line["cache"]["steps"], len(line["ids"])) for line in lines if "cache" in line]
    if not runs:
        return None
    length = max(len(steps) for steps, _ in runs)
    made = []
    for step in range(length):
        here = [(steps[step], count) for steps, count in runs if step < len(steps)]
        total = sum(count for _, count in here)
        computed = sum(mark[1] * count for mark, count in here) / total
        made.append({"step": step, "timestep": here[0][0][0], "computed": computed})
    return made

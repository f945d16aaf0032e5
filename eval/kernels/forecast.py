"""Forecasts and their differences at the sizes of FLUX.1-dev and Wan2.1-1.3B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kernels.case import SIZES, KernelCase, compiled, tensors
from diffcache.kernels import forecast

DISTANCE = 3


def _terms(shape: tuple[int, int], count: int) -> Callable[[torch.device, bool], tuple[list[Tensor], Tensor]]:
    def make(device: torch.device, tiny: bool) -> tuple[list[Tensor], Tensor]:
        base, *terms = tensors(count + 1, shape)(device, tiny)
        return terms, base

    return make


def weights(count: int) -> list[float]:
    """Return the weights of Taylor's forecast with `count` terms."""
    return [DISTANCE**power / math.factorial(power) for power in range(count)]


def _as_published(terms: Sequence[Tensor], base: Tensor) -> Any:
    """Forecast with the operations of TaylorSeer's own code: a product and a sum for each order."""
    total: Any = 0
    for power, term in enumerate(terms):
        total = total + (1 / math.factorial(power)) * term * (DISTANCE**power)
    return base + total


def _sum(terms: list[Tensor], base: Tensor) -> Tensor:
    return forecast.sum_twin(terms, weights(3), base, None)


def _differences(terms: list[Tensor], fresh: Tensor) -> list[Tensor]:
    return forecast.differences_twin(fresh, terms[:2], [5.0, 5.0])


def _launch_sum(terms: list[Tensor], base: Tensor) -> Any:
    return forecast.SUM(terms, weights(3), base, None)


def _launch_differences(terms: list[Tensor], fresh: Tensor) -> list[Tensor]:
    forecast.DIFFERENCES(fresh, terms[:2], terms[1:], [5.0, 5.0])
    return terms[1:]


def cases() -> Iterator[KernelCase]:
    """Yield the rows of the benchmark."""
    for model, shape in SIZES.items():
        moved, shown = 5 * 2 * math.prod(shape), f"{list(shape)} bfloat16, order 2"
        sums = {"kernel": _launch_sum, "plain": _sum, "as published": _as_published, "torch.compile": compiled(_sum)}
        yield KernelCase(
            "weighted_sum",
            model,
            f"{shown}, and a base",
            _terms(shape, 3),
            sums,
            moved,
            target={"as published": 4.0, "limit": 1 / 1.15},
        )
        differences = {"kernel": _launch_differences, "plain": _differences, "torch.compile": compiled(_differences)}
        yield KernelCase(
            "finite_differences", model, shown, _terms(shape, 3), differences, moved, target={"plain": 1.5}
        )

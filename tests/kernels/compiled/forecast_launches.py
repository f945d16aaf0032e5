"""Configurations of the kernels of forecasts."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import forecast
from tests.kernels.compiled.machine import Launch

HALF = MockTensor(torch.bfloat16)


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    size = 4608 * 3072
    found = [
        Launch(
            f"weighted_sum-{count}-{extra}", forecast.sum_kernel,
            (*[HALF] * 8, size, 1.0, 3.0, 4.5, 4.5, 3.0),
            {"COUNT": count, "BASE": extra, "GATE": extra, **forecast.DEFAULT},
        )
        for count, extra in ((1, True), (3, False), (3, True), (5, True))
    ]  # fmt: skip
    found += [
        Launch(
            f"finite_differences-{count}", forecast.differences_kernel,
            (*[HALF] * 9, size, 0.2, 0.2, 0.2, 0.2), {"COUNT": count, **forecast.DEFAULT},
        )
        for count in (1, 2, 4)
    ]  # fmt: skip
    return found

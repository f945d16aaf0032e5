"""Codes of the inputs of quantized layers, at the sizes of FLUX.1-dev and Wan2.1-1.3B."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffcache.eval.workshop.kernels.case import KernelCase
from diffcache.eval.workshop.kernels.forecast import SIZES
from diffcache.kernels import codes

SCALE, ZERO = 6 / 255, 128


def _launch(values: Tensor) -> Tensor:
    found: Tensor = codes.CODES(values, SCALE, ZERO, None, None, 8)
    return found


def _plain(values: Tensor) -> Tensor:
    return codes.codes_twin(values, SCALE, ZERO, 8)


def cases() -> list[KernelCase]:
    """Return the rows of the benchmark."""
    found = []
    for model, shape in SIZES.items():

        def make(device: torch.device, tiny: bool, shape: tuple[int, int] = shape) -> tuple[Tensor]:
            size = (8, 64) if tiny else shape
            return (torch.randn(*size, device=device, dtype=torch.bfloat16),)

        ways = {"kernel": _launch, "plain": _plain, "torch.compile": torch.compile(_plain)}
        found.append(
            KernelCase(
                "int8_codes", model, f"{list(shape)} bfloat16", make, ways, 3 * math.prod(shape),
                target={"plain": 4.0},
            )
        )  # fmt: skip
    return found

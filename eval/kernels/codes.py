"""Codes of the inputs of quantized layers, at the sizes of FLUX.1-dev and Wan2.1-1.3B."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from diffcache.eval.kernels.case import SIZES, KernelCase, compiled, tensors
from diffcache.kernels import codes

SCALE, ZERO = 6 / 255, 128


def _launch(values: Tensor) -> Tensor:
    found: Tensor = codes.CODES(values, SCALE, ZERO, None, None, 8)
    return found


def _plain(values: Tensor) -> Tensor:
    return codes.codes_twin(values, SCALE, ZERO, 8)


def cases() -> Iterator[KernelCase]:
    """Yield the rows of the benchmark."""
    for model, shape in SIZES.items():
        ways = {"kernel": _launch, "plain": _plain, "torch.compile": compiled(_plain)}
        yield KernelCase(
            "int8_codes",
            model,
            f"{list(shape)} bfloat16",
            tensors(1, shape),
            ways,
            3 * math.prod(shape),
            target={"plain": 4.0},
        )

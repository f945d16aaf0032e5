"""Calls of the operators of diffcache.kernels.codes."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import codes
from tests.kernels.cases import Case, guarded

SHAPES = ((1,), (15,), (3, 16), (2, 5, 50), (70, 64), (2, 3, 5, 7), (3, 1100), (4099,))


def rounded(values: Tensor, scale: float, zero: int, scales: Any, zeros: Any, bits: int) -> list[Tensor]:
    """Return the codes, by the nearest of all of them to each number."""
    width, middle = scale if scales is None else scales, zero if zeros is None else zeros
    steps = values / width + middle
    every = torch.arange(2**bits)
    nearest = (steps[..., None] - every).abs().argmin(-1)
    return [nearest - 2 ** (bits - 1)]


def rounds(dtype: torch.dtype) -> Iterator[Case]:
    """Yield roundings with one scale, with one a row, of all widths and of far numbers."""
    for seed, shape in enumerate(SHAPES):
        bits = (8, 4)[seed % 2]
        zero, scale = 2 ** (bits - 1) - 3, math.sqrt(29) / 2**bits  # no ties
        args = guarded(shape, dtype, seed), scale, zero, None, None, bits
        yield Case(f"codes{bits}-{shape}", codes.CODES, args, rounded)
        if bits == 4:
            continue
        scales = guarded((*shape[:-1], 1), torch.float32, 50 + seed).abs_().add_(0.01).mul_(0.03)
        zeros = (torch.arange(scales.numel(), dtype=torch.int32) % 256).view(scales.shape)
        args = guarded(shape, dtype, seed), 1.0, 0, scales, zeros, 8
        yield Case(f"codes-rows-{shape}", codes.CODES, args, rounded)
    far = guarded((3, 40), dtype, 1)
    far[0, :4] = torch.tensor([3e4, -3e4, 0, -0.0])
    yield Case("codes-far", codes.CODES, (far, 1e-4, 255, None, None, 8), rounded)
    turned = guarded((2, 9, 40), dtype, 2).transpose(0, 2)
    yield Case("codes-strides", codes.CODES, (turned, math.pi / 150, 128, None, None, 8), rounded)


FAMILIES = (rounds,)

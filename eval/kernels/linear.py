"""Products of int8 codes at the sizes of the widest layers of FLUX.1-dev and Wan2.1-1.3B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.eval.kernels.case import KernelCase
from diffcache.kernels import linear
from diffcache.quant.integer import int_matmul

SIZES = {"FLUX.1-dev": (4608, 3072, 12288), "Wan2.1-1.3B": (4680, 1536, 8960)}
ZERO = 3


def _launch(
    dense: Any, rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor
) -> Tensor:
    return linear.linear_of_codes(rows, codes, terms, zero, factor, shift, torch.bfloat16)


def _plain(dense: Any, rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor) -> Tensor:
    return linear.linear_twin(rows, codes, terms, zero, factor, shift, torch.bfloat16)


def _in_steps(
    dense: Any, rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor
) -> Tensor:
    """Multiply with torch's own int8 product where it takes the shapes, and scale after it."""
    sums, zeros = terms
    out = int_matmul(rows, codes)
    out -= rows.sum(1, keepdim=True, dtype=torch.int32) * zeros
    out += zero * (rows.shape[1] * zeros - sums)
    return out.float().mul_(factor).add_(shift).bfloat16()


def _dense(dense: tuple[Tensor, Tensor, Tensor], *_: Any) -> Tensor:
    """Multiply the numbers that the codes stand for, in bfloat16."""
    return functional.linear(*dense)


def cases() -> Iterator[KernelCase]:
    """Yield the rows of the benchmark."""
    for model, shape in SIZES.items():

        def make(device: torch.device, tiny: bool, shape: tuple[int, int, int] = shape) -> tuple[Any, ...]:
            height, depth, width = (24, 64, 40) if tiny else shape
            rows, codes = (
                torch.randint(-128, 128, (n, depth), device=device, dtype=torch.int8) for n in (height, width)
            )
            zeros = torch.randint(-9, 10, (width,), device=device, dtype=torch.int32)
            terms = torch.stack((codes.sum(1, dtype=torch.int32), zeros))
            factor = torch.rand(width, device=device) / 5000 / depth**0.5
            shift = torch.randn(width, device=device)
            weight = ((codes - zeros[:, None]) * factor[:, None]).bfloat16()
            dense = (rows.int() - ZERO).bfloat16(), weight, shift.bfloat16()
            return dense, rows, codes, terms, ZERO, factor, shift

        height, depth, width = shape
        ways = {"kernel": _launch, "plain": _plain, "in steps": _in_steps, "dense": _dense}
        yield KernelCase(
            "linear_of_codes",
            model,
            f"[{height}, {depth}] x [{width}, {depth}] int8",
            make,
            ways,
            (height + width) * depth + 2 * height * width,
            flops=2 * height * depth * width,
            target={"in steps": 1.2, "dense": 1.2},
            instead="in steps",
        )

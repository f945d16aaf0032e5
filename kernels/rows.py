"""Hold rows of numbers as int8 codes with a scale each, and forecast from the codes as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels.dispatch import DTYPES, define, no_products
from diffcache.kernels.forecast import MOST, sum_twin, weighted_sum

WIDEST = 16384  # numbers of a row that the kernel holds at once
LARGEST = 127
# one part in 256 up: rounding the scale to bfloat16 must not push a number past 127
ROOM = 1 + 2**-8
LEAST = 1e-30
# in float16, of numbers above 65024: 127 times the next scale in bfloat16 is infinite there
MOST_HALF = 512.0


def pack_rows(tensor: Tensor, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return symmetric int8 codes, and the width of a code along an axis.

    The largest number along the axis gets a code of about 127. Infinities and NaN come back from
    `unpack_rows` as NaN, with all that shares their scale. The kernel takes contiguous tensors and
    their last axis.

    Args:
        tensor: Any shape and float dtype.
        axis: Numbers along it share a scale.

    Returns:
        Codes, int8 of the same shape, and scales, bfloat16, with size 1 along the axis.
    """
    last = tensor.dim() > 0 and axis in (-1, tensor.dim() - 1)
    fits = last and tensor.is_contiguous() and tensor.shape[-1] <= WIDEST
    codes, scale = PACK(tensor) if fits and PACK.takes(tensor) else pack_twin(tensor, axis)
    return codes, scale


def pack_twin(tensor: Tensor, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Compute `pack_rows` in plain PyTorch."""
    wide = tensor.float()
    largest = wide.abs().amax(dim=axis, keepdim=True) if tensor.dim() else wide.abs()
    scale = (largest * ROOM / LARGEST).clamp_min(LEAST)
    scale = scale.clamp_max(most_scale(tensor.dtype)).where(largest.isfinite(), scale).to(torch.bfloat16)
    codes = (wide / scale.float()).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return codes, scale


def most_scale(dtype: torch.dtype) -> float:
    """Return the largest scale of finite numbers of a dtype."""
    return MOST_HALF if dtype == torch.float16 else math.inf


def unpack_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `codes * scale`, rounded once.

    Args:
        codes: int8, any shape.
        scale: bfloat16; broadcasts. The kernel takes `[..., 1]`, one a row.
        dtype: Dtype of the result.

    Returns:
        A fresh tensor of the shape of the codes.
    """
    if _takes([codes], [scale], None, dtype):
        found: Tensor = SUM([codes], [scale], [1.0], None, dtype)
        return found
    return unpack_twin(codes, scale, dtype)


def unpack_twin(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `unpack_rows` in plain PyTorch."""
    return (codes * scale.to(torch.float32)).to(dtype)


def weighted_sum_int8(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    weights: Sequence[float],
    base: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `base + weights[0] * codes[0] * scales[0] + ...` without unpacking first.

    The kernel reads each code once, adds in float32 and rounds once. Plain PyTorch unpacks the
    terms, rounds them and goes on as `weighted_sum`.

    Args:
        codes: One to five int8 tensors of one shape.
        scales: Their scales, bfloat16; the kernel takes `[..., 1]`, one a row.
        weights: One number for each term.
        base: Same shape; is added, as a residual connection does.
        dtype: Dtype of the terms and, where the base has it as well, of the result.

    Returns:
        A fresh tensor of the shape of the codes.

    Raises:
        ValueError: If there are no terms, more than five, or other numbers of scales or weights.
    """
    if not 1 <= len(codes) == len(scales) == len(weights) <= MOST:
        raise ValueError(
            f"codes: must be 1 to {MOST} tensors with a scale and a weight each, got {len(codes)}, "
            f"{len(scales)} scales and {len(weights)} weights"
        )
    if _takes(codes, scales, base, dtype):
        numbers = [float(weight) for weight in weights]
        found: Tensor = SUM(list(codes), list(scales), numbers, base, dtype)
        return found
    terms = [unpack_rows(*pair, dtype) for pair in zip(codes, scales, strict=True)]
    fresh = len(terms) == 1 and weights[0] == 1
    total = terms[0] if fresh else weighted_sum(terms, weights)
    return total if base is None else base + total


def weighted_sum_int8_twin(
    codes: list[Tensor], scales: list[Tensor], weights: list[float], base: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute `weighted_sum_int8` in plain PyTorch, contiguous."""
    terms = [unpack_twin(*pair, dtype) for pair in zip(codes, scales, strict=True)]
    return sum_twin(terms, weights, base, None).contiguous()


def _takes(codes: Sequence[Tensor], scales: Sequence[Tensor], base: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the kernel should run: the tensors are rows, and it is chosen."""
    shape = codes[0].shape
    if not SUM.takes(*scales, *codes, base) or dtype not in DTYPES or not codes[0].numel():
        return False
    if base is not None and (base.shape != shape or base.dtype != dtype):
        return False
    rows = all(scale.shape == (*shape[:-1], 1) for scale in scales)
    return rows and all(c.shape == shape and c.is_contiguous() for c in codes)


def _pack_twin(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return pack_twin(tensor.contiguous())


def _packed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor.new_empty((*tensor.shape[:-1], 1), dtype=torch.bfloat16)
    return tensor.new_empty(tensor.shape, dtype=torch.int8), scale


def _like(codes: list[Tensor], _: Any, __: Any, base: Any, dtype: torch.dtype) -> Tensor:
    return codes[0].new_empty(codes[0].shape, dtype=dtype)


PACK = define("pack_rows(Tensor tensor) -> (Tensor, Tensor)", _pack_twin, _packed, "rows:pack_rows", no_products)
SUM = define(
    "weighted_sum_int8(Tensor[] codes, Tensor[] scales, float[] weights, Tensor? base, ScalarType dtype) -> Tensor",
    weighted_sum_int8_twin,
    _like,
    "rows:weighted_sum_int8",
    no_products,
)

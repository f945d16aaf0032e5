"""Multiply rows of int8 codes with a weight's, exactly, and scale the product in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.kernels.dispatch import DTYPES, define

EXACT = 1024  # terms of 2**14 whose sum float32 holds exactly, whatever the order


def takes_codes(*tensors: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel should run: it is chosen, and nothing is empty.

    Args:
        tensors: Those of `linear_of_codes`, in any order, one in float32 first.
        dtype: Dtype of the result.
    """
    fits = dtype in DTYPES and all(tensor.numel() for tensor in tensors)
    return fits and LINEAR.takes(*tensors)


def linear_of_codes(
    rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `sum((x - zero) * (w - zw)) * factor + shift` for codes `x` and `w`.

    The sums are exact; the kernel scales them before it writes, and rounds once.

    Args:
        rows: `[M, K]` int8.
        codes: Codes of the weight, `[O, K]` int8.
        terms: Sums of the weight's codes and its zeros `zw`, `[2, O]` int32.
        zero: The code of 0 in the rows.
        factor: `[O]` float32.
        shift: `[O]` float32.
        dtype: Dtype of the result.

    Returns:
        `[M, O]`.
    """
    found: Tensor = LINEAR(rows, codes, terms, zero, factor, shift, dtype)
    return found


def linear_twin(
    rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute `linear_of_codes` in plain PyTorch."""
    sums, zeros = terms
    out = float_matmul(rows, codes)
    out -= rows.sum(1, keepdim=True, dtype=torch.int32) * zeros
    out += zero * (rows.shape[1] * zeros - sums)
    return out.float().mul_(factor).add_(shift).to(dtype)


def float_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` of int8 codes `[M, K]` and `[N, K]` as int32, through exact float32 products."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.int32, device=left.device)
    product = torch.empty_like(total, dtype=torch.float32)
    for first in range(0, left.shape[1], EXACT):
        part = slice(first, first + EXACT)
        torch.mm(left[:, part].float(), right[:, part].float().t(), out=product)  # which autocast leaves in float32
        total += product.to(torch.int32)
    return total


def _like(rows: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], codes.shape[0], dtype=rest[-1])


def _flops(rows: Any, codes: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * codes[0])


LINEAR = define(
    "linear_of_codes(Tensor rows, Tensor codes, Tensor terms, int zero, Tensor factor, "
    "Tensor shift, ScalarType dtype) -> Tensor",
    linear_twin,
    _like,
    "linear:linear_of_codes",
    _flops,
)

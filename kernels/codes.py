"""Round numbers to the int8 codes that quantized layers multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define, no_products


def int8_codes(values: Tensor, scale: float | Tensor, zero: int | Tensor, bits: int = 8) -> Tensor:
    """Return `clamp(round(values / scale) + zero, 0, 2**bits - 1)`, lower by half the range.

    The kernel takes numbers, or tensors with one entry for each row of contiguous values. It
    multiplies by `1 / scale`, as PyTorch does on a GPU: a number in the middle of two codes may get
    either. NaN gets the lowest code.

    Args:
        values: Any shape and float dtype.
        scale: Width of a code in units of `values`; broadcasts.
        zero: The code of 0 before it is lowered, 0 to `2**bits - 1`; broadcasts.
        bits: Bits of a code, 8 or 4.

    Returns:
        int8 codes of the same shape, -128 to 127 or -8 to 7.
    """
    width, scales = (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
    middle, zeros = (0, zero) if isinstance(zero, Tensor) else (zero, None)
    if width and _takes(values, scales, zeros):
        codes: Tensor = CODES(values, width, middle, scales, zeros, bits)
        return codes
    return codes_twin(values, scale, zero, bits)


def _takes(values: Tensor, scales: Tensor | None, zeros: Tensor | None) -> bool:
    """Return whether the kernel should run: it is chosen, with numbers or one entry a row."""
    if not CODES.takes(values, scales, zeros):
        return False
    if scales is None or zeros is None:
        return scales is zeros
    return values.is_contiguous() and scales.shape == zeros.shape == (*values.shape[:-1], 1)


def codes_twin(values: Tensor, scale: float | Tensor, zero: int | Tensor, bits: int) -> Tensor:
    """Compute `int8_codes` in plain PyTorch."""
    wide = values if values.dtype is torch.float64 else values.float()  # 255 codes need 8 bits
    codes = torch.round(wide / scale) + zero
    codes = torch.fmax(codes, codes.new_zeros(()))  # NaN too, whose int8 is left open
    lowered: Tensor = codes.clamp_(max=2**bits - 1) - 2 ** (bits - 1)
    return lowered.to(torch.int8)


def _twin(values: Tensor, scale: float, zero: int, scales: Tensor | None, zeros: Tensor | None, bits: int) -> Tensor:
    whole = zero if zeros is None else zeros
    return codes_twin(values, scale if scales is None else scales, whole, bits)


def _like(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values, dtype=torch.int8)


CODES = define(
    "int8_codes(Tensor values, float scale, int zero, Tensor? scales, Tensor? zeros, int bits) -> Tensor",
    _twin,
    _like,
    "codes:int8_codes",
    no_products,
)

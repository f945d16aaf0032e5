"""Triton kernel that rounds numbers to codes, with one scale or one a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.gpu.launch import COLUMNS, aligned, row_tile

DEFAULT = {"TILE": 4096, "num_warps": 4}  # numbers of a program
CANDIDATES = {"int8_codes": combinations(TILE=(2048, 4096, 8192), num_warps=(4, 8))}
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to whole numbers
FAR = tl.constexpr(2097152.0)  # beyond any code, and near enough to be rounded so


@triton.jit
def codes_kernel(
    codes, values, scales, zeros, size, width, share, zero, BITS: tl.constexpr,
    PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round a tile to codes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    live = (column < width)[None, :] & (at < size)
    wide = tl.load(values + at, mask=live, other=0).to(tl.float32)
    if PER_ROW:
        here = row * width < size
        share = tl.div_rn(1.0, tl.load(scales + row, mask=here, other=1).to(tl.float32))[:, None]
        zero = tl.load(zeros + row, mask=here, other=0).to(tl.float32)[:, None]
    steps = tl.minimum(tl.maximum(wide * share, -FAR), FAR)
    whole = steps + NEAREST - NEAREST + zero
    whole = tl.minimum(tl.maximum(whole, 0.0), 2.0**BITS - 1) - 2.0 ** (BITS - 1)
    tl.store(codes + at, whole.to(tl.int8), mask=live)


def int8_codes(
    values: Tensor, scale: float, zero: int, scales: Tensor | None, zeros: Tensor | None, bits: int
) -> Tensor:
    """Launch `int8_codes`."""
    codes = torch.empty_like(values, dtype=torch.int8)
    here = aligned(codes, values)
    per_row = scales is not None and zeros is not None
    # one scale: memory is cut into rows of equal width
    width = values.shape[-1] if per_row else COLUMNS
    key = values.dtype, "rows" if per_row else "one", width, values.numel()
    form = row_tile(width, tuned("int8_codes", key, DEFAULT, values.device))
    rows = triton.cdiv(values.numel(), width)
    grid = (triton.cdiv(rows, form["ROWS"]), triton.cdiv(width, form["COLUMNS"]))
    extra = [here if each is None else each.contiguous() for each in (scales, zeros)]
    codes_kernel[grid](
        codes, here, *extra, values.numel(), width, 1 / scale, float(zero), BITS=bits, PER_ROW=per_row, **form
    )
    return codes

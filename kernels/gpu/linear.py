"""Triton kernel of products of int8 codes, scaled before they are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

CANDIDATES = {"linear_of_codes": combinations(COLUMNS=(64, 128, 256), DEPTH=(64, 128), num_warps=(4, 8))}


@triton.jit
def linear_kernel(
    out, rows, codes, row_sums, terms, factor, shift, height, width, depth, zero,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply one tile; both factors are read along their rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    left = rows + row.to(tl.int64)[:, None] * depth + step[None, :]
    right = codes + column.to(tl.int64)[None, :] * depth + step[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(0, depth, DEPTH):
        more = step < depth - first
        one = tl.load(left, mask=(row < height)[:, None] & more[None, :], other=0)
        other = tl.load(right, mask=(column < width)[None, :] & more[:, None], other=0)
        total = tl.dot(one, other, total, out_dtype=tl.int32)
        left += DEPTH
        right += DEPTH
    inside = column < width
    zeros = tl.load(terms + width + column, mask=inside, other=0)
    rest = zero * (depth * zeros - tl.load(terms + column, mask=inside, other=0))
    sums = tl.load(row_sums + row, mask=row < height, other=0)
    total += rest[None, :] - sums[:, None] * zeros[None, :]
    gain = tl.load(factor + column, mask=inside, other=0)
    added = tl.load(shift + column, mask=inside, other=0)
    scaled = total.to(tl.float32) * gain[None, :] + added[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    live = (row < height)[:, None] & inside[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=live)


def tile(height: int) -> dict[str, int]:
    """Return the settings of a launch for a number of rows."""
    rows = min(max(16, triton.next_power_of_2(height)), 128)
    warps = 8 if rows == 128 else 4
    return {"ROWS": rows, "COLUMNS": 128, "DEPTH": 128, "num_warps": warps, "num_stages": 3}


def linear_of_codes(
    rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    """Launch `linear_of_codes`."""
    (height, depth), width = rows.shape, codes.shape[0]
    form = tuned("linear_of_codes", (height, width, depth), tile(height), rows.device)
    out = rows.new_empty(height, width, dtype=dtype)
    sums = rows.sum(1, dtype=torch.int32)
    given = [tensor.contiguous() for tensor in (rows, codes, sums, terms, factor, shift)]
    grid = (triton.cdiv(height, form["ROWS"]), triton.cdiv(width, form["COLUMNS"]))
    linear_kernel[grid](out, *given, height, width, depth, zero, **form)
    return out

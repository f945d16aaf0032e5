"""Triton kernels of rows of int8 codes: packing, and sums of packed rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.forecast import MOST
from diffcache.kernels.gpu.launch import programs, row_tile
from diffcache.kernels.rows import LARGEST, LEAST, ROOM, most_scale

DEFAULT = {"TILE": 4096, "num_warps": 4}  # numbers of a program, and the fewest warps of it
CANDIDATES = dict.fromkeys(("pack_rows", "weighted_sum_int8"), combinations(TILE=(2048, 4096, 8192), num_warps=(4, 8)))
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to whole numbers


@triton.jit
def pack_kernel(
    codes,
    scales,
    tensor,
    rows,
    width,
    ROOM: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the scales of whole rows and divide by them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    live = (row < rows)[:, None] & (column < width)[None, :]
    wide = tl.load(tensor + at, mask=live, other=0).to(tl.float32)
    # a maximum passes over NaN: it counts as an infinity, which unpacks to NaN as well
    size = tl.max(tl.where(wide == wide, tl.abs(wide), float("inf")), axis=1)
    scale = tl.maximum(tl.div_rn(size * ROOM, LARGEST), LEAST)
    scale = tl.where(size < float("inf"), tl.minimum(scale, MOST), scale).to(tl.bfloat16)
    tl.store(scales + row, scale, mask=row < rows)
    step = scale.to(tl.float32)[:, None]
    share = tl.div_rn(1.0, step)
    # A division takes twice as long as memory does. The nearest half of a code is exact, and so is
    # what is left over it: a number in the middle of two codes goes to the even one.
    half = (wide * share * 2 + NEAREST - NEAREST) * 0.5
    quotient = half + (wide - half * step) * share
    quotient = tl.where(quotient == quotient, quotient, 0)  # of infinities
    whole = tl.clamp(quotient + NEAREST - NEAREST, -LARGEST, LARGEST)
    tl.store(codes + at, whole.to(tl.int8), mask=live)


@triton.jit
def sum_kernel(
    out, c0, c1, c2, c3, c4, s0, s1, s2, s3, s4, base, rows, width, w0, w1, w2, w3, w4,
    COUNT: tl.constexpr, BASE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the terms of a tile in float32; a weight goes into the scale of a row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    here = row < rows
    live = here[:, None] & (column < width)[None, :]
    share = w0 * tl.load(s0 + row, mask=here, other=0).to(tl.float32)
    total = tl.load(c0 + at, mask=live, other=0).to(tl.float32) * share[:, None]
    if COUNT > 1:
        share = w1 * tl.load(s1 + row, mask=here, other=0).to(tl.float32)
        total += tl.load(c1 + at, mask=live, other=0).to(tl.float32) * share[:, None]
    if COUNT > 2:
        share = w2 * tl.load(s2 + row, mask=here, other=0).to(tl.float32)
        total += tl.load(c2 + at, mask=live, other=0).to(tl.float32) * share[:, None]
    if COUNT > 3:
        share = w3 * tl.load(s3 + row, mask=here, other=0).to(tl.float32)
        total += tl.load(c3 + at, mask=live, other=0).to(tl.float32) * share[:, None]
    if COUNT > 4:
        share = w4 * tl.load(s4 + row, mask=here, other=0).to(tl.float32)
        total += tl.load(c4 + at, mask=live, other=0).to(tl.float32) * share[:, None]
    if BASE:
        total += tl.load(base + at, mask=live, other=0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


def pack_tile(width: int, options: dict[str, int] = DEFAULT) -> dict[str, int]:
    """Return the settings of a launch that takes whole rows of a width."""
    columns = max(16, triton.next_power_of_2(width))
    rows = max(1, options["TILE"] // columns)
    warps = max(options["num_warps"], columns // 1024)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}


def pack_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `pack_rows`."""
    codes = tensor.new_empty(tensor.shape, dtype=torch.int8)
    scale = tensor.new_empty((*tensor.shape[:-1], 1), dtype=torch.bfloat16)
    width = tensor.shape[-1]
    key = tensor.dtype, width, scale.numel()
    tile = pack_tile(width, tuned("pack_rows", key, DEFAULT, tensor.device))
    pack_kernel[programs(scale.numel(), tile["ROWS"])](
        codes, scale, tensor.contiguous(), scale.numel(), width,
        ROOM=ROOM, LARGEST=LARGEST, LEAST=LEAST, MOST=most_scale(tensor.dtype), **tile,
    )  # fmt: skip
    return codes, scale


def weighted_sum_int8(
    codes: list[Tensor], scales: list[Tensor], weights: list[float], base: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Launch `weighted_sum_int8`."""
    out = codes[0].new_empty(codes[0].shape, dtype=dtype)
    rows, width = scales[0].numel(), out.shape[-1]
    terms, shares = ([t.contiguous() for t in tensors] for tensors in (codes, scales))
    extra = terms[0] if base is None else base.contiguous()
    key = dtype, len(terms), width, rows
    tile = row_tile(width, tuned("weighted_sum_int8", key, DEFAULT, out.device))
    spare = MOST - len(terms)
    grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"]))
    sum_kernel[grid](
        out, *terms, *terms[:1] * spare, *shares, *shares[:1] * spare, extra, rows, width,
        *weights, *[0.0] * spare, COUNT=len(terms), BASE=base is not None, **tile,
    )  # fmt: skip
    return out

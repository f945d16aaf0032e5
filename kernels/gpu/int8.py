"""Triton kernels of attention with int8 queries and keys: one that codes, and one that attends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.int8 import KEYS, ROWS

DEFAULT = {"num_warps": 8, "num_stages": 3}
CANDIDATES = {"attn_int8": combinations(num_warps=(4, 8), num_stages=(2, 3, 4))}
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to whole numbers


@triton.jit
def code_kernel(
    codes, steps, x, mean, factor, x0, x1, x2, heads, count,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Bring a block to at most 127, in whole numbers, or to at most 1."""
    both = tl.program_id(1).to(tl.int64)
    row, col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here = (row < count)[:, None] & (col < SIZE)[None, :]
    start = x + both // heads * x0 + both % heads * x1
    wide = tl.load(start + row.to(tl.int64)[:, None] * x2 + col[None, :], mask=here, other=0.0)
    wide = wide.to(tl.float32) * factor
    if SMOOTH:
        middle = tl.load(mean + both * SIZE + col, mask=col < SIZE, other=0.0)
        wide = tl.where(here, wide - middle[None, :], 0.0)
    most = tl.max(tl.max(tl.abs(wide), 1), 0)
    one = 127.0 if WHOLE else 1.0
    found = wide * tl.where(most > 0, one / most, 0.0)
    if WHOLE:
        found = found + NEAREST - NEAREST
    at = codes + (both * count + row)[:, None] * SIZE + col[None, :]
    tl.store(at, found.to(codes.dtype.element_ty), mask=here)
    # The largest of some numbers may hide one that is none, 0 times their sum does not.
    lost = 0.0 * tl.sum(tl.sum(wide, 1), 0)
    tl.store(steps + both * tl.num_programs(0) + tl.program_id(0), most / one + lost)


@triton.jit
def int8_kernel(
    out, q, k, v, q_steps, k_steps, v_steps, count, width, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, VSIZE: tl.constexpr, VWIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend from a block of queries of a head to all keys."""
    both = tl.program_id(1).to(tl.int64)
    own = both // GROUPS
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    col, vcol = tl.arange(0, WIDTH), tl.arange(0, VWIDTH)
    here = (row < count)[:, None] & (col < SIZE)[None, :]
    asked = tl.load(q + (both * count + row)[:, None] * SIZE + col[None, :], mask=here, other=0)
    step = tl.load(q_steps + both * tl.num_programs(0) + tl.program_id(0))
    k += own * width * SIZE + place[None, :] * SIZE + col[:, None]
    v += own * width * VSIZE + place[:, None] * VSIZE + vcol[None, :]
    blocks = tl.cdiv(width, KEYS)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VWIDTH], tl.float32)
    for block in range(blocks):
        there = place < width - block * KEYS
        key = tl.load(k, mask=there[None, :] & (col < SIZE)[:, None], other=0)
        gain = step * tl.load(k_steps + own * blocks + block)
        logit = tl.dot(asked, key, out_dtype=tl.int32).to(tl.float32) * gain
        logit = tl.where(there[None, :], logit, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        old, weight = tl.exp2(top - new), tl.exp2(logit - new[:, None])
        mass = mass * old + tl.sum(weight, 1)
        value = tl.load(v, mask=there[:, None] & (vcol < VSIZE)[None, :], other=0.0)
        # At most KEYS times 1, which float16 holds; consumer cards add in it at twice the rate.
        part = tl.dot(weight.to(tl.float16), value, out_dtype=tl.float16).to(tl.float32)
        total = total * old[:, None] + part * tl.load(v_steps + own * blocks + block)
        top = new
        k += KEYS * SIZE
        v += KEYS * VSIZE
    here = (row < count)[:, None] & (vcol < VSIZE)[None, :]
    at = out + (both * count + row)[:, None] * VSIZE + vcol[None, :]
    tl.store(at, (total / mass[:, None]).to(out.dtype.element_ty), mask=here)


def attn_int8(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Launch `attn_int8`."""
    (_, asking, count, size), (batch, heads, width, last) = q.shape, v.shape
    mean = k.mean(2, dtype=torch.float32)
    given: list[Tensor] = []
    steps: list[Tensor] = []
    for x, block, factor, smooth, dtype in (
        (q, ROWS, scale * 1.4426950408889634, False, torch.int8),
        (k, KEYS, 1.0, True, torch.int8),
        (v, KEYS, 1.0, False, torch.float16),
    ):
        x = x if x.stride(3) == 1 else x.contiguous()
        blocks, rows = triton.cdiv(x.shape[2], block), x.shape[0] * x.shape[1]
        given.append(x.new_empty(x.shape, dtype=dtype))
        steps.append(x.new_empty(rows, blocks, dtype=torch.float32))
        code_kernel[(blocks, rows)](
            given[-1], steps[-1], x, mean, factor, *x.stride()[:3], x.shape[1], x.shape[2],
            SIZE=x.shape[3], WIDTH=_padded(x.shape[3]), BLOCK=block, SMOOTH=smooth,
            WHOLE=dtype is torch.int8, num_warps=4,
        )  # fmt: skip
    out = q.new_empty(*q.shape[:3], last)
    key = q.dtype, max(size, last), count, width
    int8_kernel[(triton.cdiv(count, ROWS), batch * asking)](
        out, *given, *steps, count, width, GROUPS=asking // heads, SIZE=size, WIDTH=_padded(size),
        VSIZE=last, VWIDTH=_padded(last), ROWS=ROWS, KEYS=KEYS,
        **tuned("attn_int8", key, DEFAULT, q.device),
    )  # fmt: skip
    return out


def _padded(size: int) -> int:
    """Return the channels of a tile; Triton multiplies 32 int8 columns at least."""
    return max(int(triton.next_power_of_2(size)), 32)

"""Triton kernels that attend to coded keys and values: parts of the slots, then all together."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.gpu.quantize import restored, spread

LOG2E = tl.constexpr(1.4426950408889634)
ROWS = 16  # query heads of a program: the least that products of matrices are made of
PROGRAMS = 1024  # about as many as keep a large GPU busy
LEAST, MOST_PARTS = 256, 64  # slots of a part; parts
WARPS = 4
CANDIDATES = {"attn_decode_kivi": combinations(BLOCK=(16, 32, 64, 128), num_warps=(4, 8))}


@triton.jit
def widened(x, WIDE: tl.constexpr):
    """Repeat every column of [N, W], as [N, WIDE]."""
    ROWS: tl.constexpr = x.shape[0]
    TIMES: tl.constexpr = WIDE // x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, x.shape[1], TIMES)), (ROWS, WIDE))


@triton.jit
def part_kernel(
    outs, lses, q, keys, key_grid, values, value_grid, scale, count, key_slots, each, chunk,
    key_shift, value_shift, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr, WORK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the slots of a key-value head, for all of its query heads."""
    KEY_ROOM: tl.constexpr = SIZE * KEY_BITS // 8
    VALUE_ROOM: tl.constexpr = WIDE * VALUE_BITS // 8
    part = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    head, channel, out_channel = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, WIDE)
    live = (head < GROUPS)[:, None]
    asked = tl.load(q + (pair * GROUPS + head)[:, None] * SIZE + channel[None, :], mask=live,
                    other=0.0).to(tl.float32) * (scale * LOG2E)  # fmt: skip
    # Queries and scales are brought to at most 1, so that their product fits float16.
    most = tl.max(tl.abs(asked), 1)
    most = tl.where(most > 0, most, 1.0)
    unit = asked / most[:, None]
    key_byte, value_byte = tl.arange(0, KEY_ROOM), tl.arange(0, VALUE_ROOM)
    column = tl.arange(0, COLUMNS)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDE], tl.float32)
    stop = tl.minimum(part * chunk + chunk, count)
    for first in range(part * chunk, stop, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        there = slot < count
        line = key_grid + (pair * (key_slots // each) + first // each) * KEY_PARTS * SIZE + channel
        step = tl.load(line).to(tl.float32)
        low = tl.load(line + SIZE).to(tl.float32) if KEY_PARTS == 2 else step * key_shift
        packed = tl.load(
            keys + (pair * key_slots + slot)[:, None] * KEY_ROOM + key_byte[None, :],
            mask=there[:, None], other=0,
        )  # fmt: skip
        widest = tl.max(step, 0)
        widest = tl.where(widest > 0, widest, 1.0)
        scaled = (unit * (step / widest)[None, :]).to(WORK)
        found = tl.dot(scaled, tl.trans(spread(packed, KEY_BITS).to(WORK)), input_precision="ieee")
        found = found * (most * widest)[:, None] + tl.sum(asked * low[None, :], 1)[:, None]
        found = tl.where(there[None, :], found, float("-inf"))
        high = tl.maximum(peak, tl.max(found, 1))
        weights = tl.exp2(found - high[:, None])
        fade = tl.exp2(peak - high)
        total = total * fade + tl.sum(weights, 1)
        at = value_grid + (pair * count + slot)[:, None] * (VALUE_PARTS * COLUMNS) + column[None, :]
        gap = tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)
        if VALUE_PARTS == 2:
            base = tl.load(at + COLUMNS, mask=there[:, None], other=0.0).to(tl.float32)
        else:
            base = gap * value_shift
        packed = tl.load(
            values + (pair * count + slot)[:, None] * VALUE_ROOM + value_byte[None, :],
            mask=there[:, None], other=0,
        )  # fmt: skip
        gap, base = widened(gap, VALUE_ROOM), widened(base, VALUE_ROOM)
        known = restored(packed, gap, base, VALUE_BITS, q.dtype.element_ty)
        summed = summed * fade[:, None] + tl.dot(
            weights.to(q.dtype.element_ty), known, input_precision="ieee"
        )
        peak = high
    to = (pair * tl.num_programs(0) + part) * GROUPS + head
    tl.store(lses + to, peak + tl.log2(total), mask=head < GROUPS)
    tl.store(outs + to[:, None] * WIDE + out_channel[None, :], summed / total[:, None], mask=live)


@triton.jit
def merge_kernel(
    out, lse, outs, lses, parts, GROUPS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Merge the parts of one query head."""
    row = tl.program_id(0).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, WIDE)
    at = ((row // GROUPS) * parts + part) * GROUPS + row % GROUPS
    known = tl.load(lses + at, mask=part < parts, other=float("-inf"))
    peak = tl.max(known, 0)
    weights = tl.exp2(known - peak)
    total = tl.sum(weights, 0)
    found = tl.load(outs + at[:, None] * WIDE + channel[None, :], mask=(part < parts)[:, None],
                    other=0.0)  # fmt: skip
    tl.store(out + row * WIDE + channel, tl.sum(found * weights[:, None], 0) / total)
    tl.store(lse + row, (peak + tl.log2(total)) / LOG2E)


def attn_decode_kivi(
    q: Tensor, keys: Tensor, key_grid: Tensor, values: Tensor, value_grid: Tensor, scale: float,
    key_bits: int, value_bits: int, each: int, width: int, key_shift: float, value_shift: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `attn_decode_kivi`."""
    q, keys, key_grid, values, value_grid = (
        x.contiguous() for x in (q, keys, key_grid, values, value_grid)
    )
    batch, heads, count = values.shape[:3]
    groups, size, wide = q.shape[1] // heads, q.shape[2], width * value_grid.shape[-1]
    default = {"BLOCK": block_of(each, max(size, wide), q.dtype), "num_warps": WARPS}
    key = q.dtype, max(size, wide), key_bits, value_bits, each, groups, count
    form = tuned("attn_decode_kivi", key, default, q.device)
    block = math.gcd(form["BLOCK"], each)  # slots of a block are of one group of keys
    parts, chunk = split(count, batch * heads, block)
    outs = q.new_empty(batch * heads, parts, groups, wide, dtype=torch.float32)
    lses = q.new_empty(batch * heads, parts, groups, dtype=torch.float32)
    part_kernel[(parts, batch * heads)](
        outs, lses, q, keys, key_grid, values, value_grid, scale, count, keys.shape[2], each,
        chunk, key_shift, value_shift, GROUPS=groups, SIZE=size, WIDE=wide,
        COLUMNS=value_grid.shape[4], KEY_BITS=key_bits, VALUE_BITS=value_bits,
        KEY_PARTS=key_grid.shape[3], VALUE_PARTS=value_grid.shape[3], WORK=work(q.dtype),
        ROWS=ROWS, BLOCK=block, num_warps=form["num_warps"],
    )  # fmt: skip
    out = q.new_empty(batch, q.shape[1], wide, dtype=torch.float32)
    lse = q.new_empty(batch, q.shape[1], dtype=torch.float32)
    merge_kernel[(batch * q.shape[1],)](
        out, lse, outs, lses, parts, GROUPS=groups, WIDE=wide,
        PARTS=triton.next_power_of_2(parts), num_warps=WARPS,
    )  # fmt: skip
    return out, lse


def work(dtype: torch.dtype) -> tl.dtype:
    """Return what products with codes of keys are made in: float16 is finer than bfloat16."""
    return tl.float32 if dtype == torch.float32 else tl.float16


def block_of(each: int, size: int, dtype: torch.dtype) -> int:
    """Return how many slots are read at once: they are of one group of keys."""
    most = (16 if dtype == torch.float32 else 128) * 128 // max(size, 128)
    return next(block for block in (128, 64, 32, 16) if block <= max(most, 16) and not each % block)


def split(count: int, pairs: int, block: int) -> tuple[int, int]:
    """Return how many parts the slots of a head are split into, and the slots of a part."""
    wanted = min(max(PROGRAMS // pairs, 1), MOST_PARTS)
    chunk = max(-(-count // wanted), min(LEAST, 4 * block))
    chunk = -(-chunk // block) * block
    return -(-count // chunk), chunk

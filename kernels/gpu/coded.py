"""Triton kernels that attend to coded keys and values: parts of the slots, then all together."""

# Triton fixes lengths of tuples when it compiles a kernel, and knows them where mypy does not.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.dispatch import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
LITTLE = tl.constexpr(1e-30)  # smaller scales are taken for it, so that their inverses are finite
PROGRAMS = 1024  # about as many as keep a large GPU busy
LEAST, MOST_PARTS = 256, 128  # slots of a part; parts
CANDIDATES = {"attn_decode_kivi": combinations(BLOCK=(16, 32, 64), num_warps=(1, 2, 4))}
# Two units in, two float16 of each plane out: the codes of the low bytes, then of the high ones.
EIGHT = tl.constexpr("""{ .reg .b32 high; shr.b32 high, $2, 8;
    and.b32 $0, $2, 0x00ff00ff; and.b32 $1, high, 0x00ff00ff; }""")
FOUR = tl.constexpr("""{ .reg .b32 high; shr.b32 high, $4, 8;
    and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;
    and.b32 $2, high, 0x000f000f; and.b32 $3, high, 0x00f000f0; }""")
TWO = tl.constexpr("""{ .reg .b32 high; shr.b32 high, $8, 8;
    and.b32 $0, $8, 0x00030003; and.b32 $1, $8, 0x000c000c;
    and.b32 $2, $8, 0x00300030; and.b32 $3, $8, 0x00c000c0;
    and.b32 $4, high, 0x00030003; and.b32 $5, high, 0x000c000c;
    and.b32 $6, high, 0x00300030; and.b32 $7, high, 0x00c000c0; }""")


@triton.jit
def planes(units, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return the codes of units of 16 or 8 bits as float16, the codes of the lowest bits first.

    A code is left where it is in its byte, and the other bits are cleared. Read as a float16, such
    a number is subnormal: the code at bit `p` of a byte is itself times 2 ** (p - 24), exactly.
    Tensor cores of V100, T4 and A100 take subnormal float16 as they are (Fasi et al., Numerical
    behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021), so that no code is ever
    converted. Their sums are aligned by the largest exponent: how many bits are kept of sums of
    such small numbers `tests/kernels/test_gpu.py` shows: it passes on an H200, the only one tried.
    """
    if not ASM or units.dtype.primitive_bitwidth == 8:
        found = ()
        for place in tl.static_range(units.dtype.primitive_bitwidth // BITS):
            byte = units.to(tl.int16) >> (place * BITS // 8 * 8)
            code = byte & (((1 << BITS) - 1) << (place * BITS % 8))
            found += (code.to(tl.int16).to(tl.float16, bitcast=True),)
    elif BITS == 8:
        found = tl.inline_asm_elementwise(EIGHT, "=r,=r,r", [units], (tl.float16,) * 2, True, 2)
    elif BITS == 4:
        found = tl.inline_asm_elementwise(FOUR, "=r,=r,=r,=r,r", [units], (tl.float16,) * 4, True, 2)
    else:
        found = tl.inline_asm_elementwise(TWO, "=r,=r,=r,=r,=r,=r,=r,=r,r", [units], (tl.float16,) * 8, True, 2)
    return found


@triton.jit
def copied(x, COUNT: tl.constexpr):
    """Repeat all of [N], as [COUNT * N]."""
    SIZE: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[None, :], (COUNT, SIZE)), (COUNT * SIZE,))


@triton.jit
def apart(x, COUNT: tl.constexpr):
    """Return every `COUNT`-th of [N] numbers, from the first, from the second and so on."""
    found = (x,)
    if COUNT >= 2:
        found = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    if COUNT >= 4:
        even, odd = found
        HALF: tl.constexpr = x.shape[0] // 4
        one, three = tl.split(tl.reshape(even, (HALF, 2)))
        two, four = tl.split(tl.reshape(odd, (HALF, 2)))
        found = (one, two, three, four)
    if COUNT == 8:
        one, two, three, four = found
        QUARTER: tl.constexpr = x.shape[0] // 8
        one, five = tl.split(tl.reshape(one, (QUARTER, 2)))
        two, six = tl.split(tl.reshape(two, (QUARTER, 2)))
        three, seven = tl.split(tl.reshape(three, (QUARTER, 2)))
        four, eight = tl.split(tl.reshape(four, (QUARTER, 2)))
        found = (one, two, three, four, five, six, seven, eight)
    return found


@triton.jit
def part_kernel(
    outs, lses, q, keys, key_grid, values, value_grid, scale, count, key_slots, chunk,
    key_shift, value_shift, EACH: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr,
    WORK: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the slots of a key-value head, for all of its query heads.

    Codes are the left factor of both products, plane by plane: plane 0 of
    four holds channels 0, 4, 8, ..., and channels of queries and results are read and written to match.
    """
    KEY_PLANES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // KEY_BITS
    VALUE_PLANES: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // VALUE_BITS
    KEY_ROOM: tl.constexpr = SIZE // KEY_PLANES
    VALUE_ROOM: tl.constexpr = WIDE // VALUE_PLANES
    part = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    head, channel, column = tl.arange(0, QUERIES), tl.arange(0, SIZE), tl.arange(0, COLUMNS)
    key_unit, value_unit = tl.arange(0, KEY_ROOM), tl.arange(0, VALUE_ROOM)
    start = q + (pair * GROUPS + head)[None, :] * SIZE + (key_unit * KEY_PLANES)[:, None]
    # Queries and scales are brought to at most 1, so that their product fits float16.
    most = tl.zeros([QUERIES], tl.float32)
    for place in tl.static_range(KEY_PLANES):
        asked = tl.load(start + place, mask=(head < GROUPS)[None, :], other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(asked), 0))
    most = tl.where(most > 0, most, 1.0)
    unit = ()
    for place in tl.static_range(KEY_PLANES):
        asked = tl.load(start + place, mask=(head < GROUPS)[None, :], other=0.0).to(tl.float32)
        unit += ((asked / most[None, :]).to(WORK),)
    most *= scale * LOG2E
    reach = LITTLE + 0.0
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    lows = tl.zeros([COLUMNS * QUERIES], tl.float32)
    summed = ()
    for _ in tl.static_range(VALUE_PLANES):
        summed += (tl.zeros([VALUE_ROOM, COLUMNS * QUERIES], tl.float32),)
    stop = tl.minimum(part * chunk + chunk, count)
    for first in tl.range(part * chunk, stop, BLOCK, num_stages=3):
        slot = first + tl.arange(0, BLOCK)
        there = slot < count
        line = key_grid + (pair * (key_slots // EACH) + first // EACH) * KEY_PARTS * SIZE + channel
        step = tl.load(line).to(tl.float32)
        low = tl.load(line + SIZE).to(tl.float32) if KEY_PARTS == 2 else step * key_shift
        units = tl.load(keys + (pair * key_slots + slot)[:, None] * KEY_ROOM + key_unit[None, :])
        widest = tl.maximum(tl.max(step, 0), LITTLE)
        inverse = 1 / widest
        codes = planes(units, KEY_BITS, ASM)
        step, low = apart(step * inverse, KEY_PLANES), apart(low, KEY_PLANES)
        found = tl.zeros([BLOCK, QUERIES], tl.float32)
        base = tl.zeros([KEY_ROOM, QUERIES], tl.float32)
        for place in tl.static_range(KEY_PLANES):
            # All planes are brought to the size of the one of the highest bits.
            level = step[place] * 2.0 ** (8 - KEY_BITS - place * KEY_BITS % 8)
            scaled = unit[place] * level.to(WORK)[:, None]
            found = tl.dot(codes[place].to(WORK), scaled, found, input_precision="ieee")
            base += unit[place].to(tl.float32) * low[place][:, None]
        found = found * (most * (widest * 2.0 ** (16 + KEY_BITS)))[None, :]
        found = tl.where(there[:, None], found + (most * tl.sum(base, 0))[None, :], float("-inf"))
        high = tl.maximum(peak, tl.max(found, 0))
        weights = tl.exp2(found - high[None, :])
        fade = tl.exp2(peak - high)
        total = total * fade + tl.sum(weights, 0)
        peak = high
        at = value_grid + (pair * count + slot)[:, None] * (VALUE_PARTS * COLUMNS) + column[None, :]
        gap = tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)
        if VALUE_PARTS == 2:
            low = tl.load(at + COLUMNS, mask=there[:, None], other=0.0).to(tl.float32)
        else:
            low = gap * value_shift
        units = tl.load(
            values + (pair * count + slot)[None, :] * VALUE_ROOM + value_unit[:, None], mask=there[None, :], other=0
        )
        # The scales of values go with the weights, brought to at most 1, too.
        wider = tl.maximum(reach, tl.max(tl.max(gap, 1), 0))
        inverse = 1 / wider
        weighted = weights[:, None, :] * (gap * inverse)[:, :, None]
        weighted = tl.reshape(weighted, (BLOCK, COLUMNS * QUERIES)).to(WORK)
        fade = copied(fade, COLUMNS)
        based = tl.reshape(weights[:, None, :] * low[:, :, None], (BLOCK, COLUMNS * QUERIES))
        lows = lows * fade + tl.sum(based, 0)
        fade *= reach * inverse
        reach = wider
        codes = planes(units, VALUE_BITS, ASM)
        more = ()
        for place in tl.static_range(VALUE_PLANES):
            plane, faded = codes[place].to(WORK), summed[place] * fade[None, :]
            more += (tl.dot(plane, weighted, faded, input_precision="ieee"),)
        summed = more
    to = (pair * tl.num_programs(0) + part) * GROUPS
    tl.store(lses + to + head, peak + tl.log2(total), mask=head < GROUPS)
    # A query has a column for each group of channels: of these, every channel has one.
    copy = tl.arange(0, COLUMNS * QUERIES)
    group, query = copy // QUERIES, copy % QUERIES
    total = copied(total, COLUMNS)
    for place in tl.static_range(VALUE_PLANES):
        channel = (value_unit * VALUE_PLANES + place)[:, None]
        out = summed[place] * (reach * 2.0 ** (24 - place * VALUE_BITS % 8)) + lows[None, :]
        own = (channel // (WIDE // COLUMNS) == group[None, :]) & (query < GROUPS)[None, :]
        tl.store(outs + (to + query)[None, :] * WIDE + channel, out / total[None, :], mask=own)


@triton.jit
def merge_kernel(out, lse, outs, lses, parts, GROUPS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """Merge the parts of one query head."""
    row = tl.program_id(0).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, WIDE)
    at = ((row // GROUPS) * parts + part) * GROUPS + row % GROUPS
    known = tl.load(lses + at, mask=part < parts, other=float("-inf"))
    peak = tl.max(known, 0)
    weights = tl.exp2(known - peak)
    total = tl.sum(weights, 0)
    found = tl.load(outs + at[:, None] * WIDE + channel[None, :], mask=(part < parts)[:, None], other=0.0)
    tl.store(out + row * WIDE + channel, tl.sum(found * weights[:, None], 0) / total)
    tl.store(lse + row, (peak + tl.log2(total)) / LOG2E)


def attn_decode_kivi(
    q: Tensor, keys: Tensor, key_grid: Tensor, values: Tensor, value_grid: Tensor, scale: float,
    key_bits: int, value_bits: int, each: int, width: int, key_shift: float, value_shift: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `attn_decode_kivi`."""
    q, keys, key_grid, values, value_grid = (x.contiguous() for x in (q, keys, key_grid, values, value_grid))
    batch, heads, count = values.shape[:3]
    groups, size, wide = q.shape[1] // heads, q.shape[2], width * value_grid.shape[-1]
    queries = triton.next_power_of_2(groups)
    columns = value_grid.shape[4]
    default = {
        "BLOCK": block_of(each, max(keys.shape[3], values.shape[3]), q.dtype),
        "num_warps": warps_of(columns * queries * wide, q.dtype),
    }
    key = q.dtype, max(size, wide), key_bits, value_bits, each, groups, count
    form = tuned("attn_decode_kivi", key, default, q.device)
    block = form["BLOCK"] = math.gcd(form["BLOCK"], each)  # its slots are of one group of keys
    read = words(keys) if keys.shape[3] >= 32 else keys  # a product takes 16 units at least
    parts, chunk = split(count, batch * heads, block)
    outs = q.new_empty(batch * heads, parts, groups, wide, dtype=torch.float32)
    lses = q.new_empty(batch * heads, parts, groups, dtype=torch.float32)
    part_kernel[(parts, batch * heads)](
        outs, lses, q, read, key_grid, words(values), value_grid, scale, count, keys.shape[2],
        chunk, key_shift, value_shift, EACH=each, GROUPS=groups, QUERIES=queries, SIZE=size,
        WIDE=wide, COLUMNS=columns, KEY_BITS=key_bits, VALUE_BITS=value_bits,
        KEY_PARTS=key_grid.shape[3], VALUE_PARTS=value_grid.shape[3], WORK=work(q.dtype),
        ASM=not INTERPRETED, **form,
    )  # fmt: skip
    out = q.new_empty(batch, q.shape[1], wide, dtype=torch.float32)
    lse = q.new_empty(batch, q.shape[1], dtype=torch.float32)
    merge_kernel[(batch * q.shape[1],)](
        out, lse, outs, lses, parts, GROUPS=groups, WIDE=wide, PARTS=triton.next_power_of_2(parts), num_warps=8
    )
    return out, lse


def work(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of products with codes of keys: float16 is finer than bfloat16."""
    return tl.float32 if dtype == torch.float32 else tl.float16


def words(codes: Tensor) -> Tensor:
    """Return bytes of codes as units of 16 bits, aligned so that 16 bytes are read at once."""
    if codes.storage_offset() % 16:
        codes = codes.clone()
    return codes.view(torch.int16)


def block_of(each: int, room: int, dtype: torch.dtype) -> int:
    """Return how many slots of at most `room` bytes are read at once: they are of one group."""
    most = 16 if dtype == torch.float32 else max(4096 // room, 16)
    return next(block for block in (64, 32, 16) if block <= most and not each % block)


def warps_of(sums: int, dtype: torch.dtype) -> int:
    """Return the warps of a program that holds `sums` sums: 64 of them to a thread, if it can."""
    return max(sums // 2048, 4 if dtype == torch.float32 else 1)


def split(count: int, pairs: int, block: int) -> tuple[int, int]:
    """Return how many parts the slots of a head are split into, and the slots of a part."""
    wanted = min(max(PROGRAMS // pairs, 1), MOST_PARTS)
    chunk = max(-(-count // wanted), min(LEAST, 4 * block))
    chunk = -(-chunk // block) * block
    return -(-count // chunk), chunk

"""Triton kernels that code numbers in few bits and take them back: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it leaves whole numbers, ties to even

DEFAULT = {"TILE": 4096, "num_warps": 4}  # numbers of a program
CANDIDATES = {
    "quant_groups": combinations(TILE=(1024, 2048, 4096), num_warps=(1, 2, 4)),
    "dequant_groups": combinations(TILE=(2048, 4096, 8192), num_warps=(4, 8)),
}


@triton.jit
def grid_of(high, low, bad, intervals, limit, dtype: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Return scales and values of code 0 as they are stored; NaN where `bad` is 1."""
    if SYMMETRIC:
        high = tl.maximum(tl.abs(high), tl.abs(low))
        low = -high
    scale = tl.div_rn(high - low, intervals + tl.zeros_like(high))
    scale = tl.where(scale > limit, limit, scale)
    low = tl.where(low > limit, limit, tl.where(low < -limit, -limit, low))
    scale = tl.where(bad > 0, float("nan"), scale)
    low = tl.where(bad > 0, float("nan"), low)
    return scale.to(dtype), low.to(dtype)


@triton.jit
def bytes_of(x, scale, low, live, top, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Return codes of [ROWS, CHANNELS] numbers, packed; those that are not live are 0."""
    PER: tl.constexpr = 8 // BITS
    step = tl.where(scale > 0, scale, float("inf"))
    found = tl.minimum(tl.maximum((x - low) / step, 0.0), top)
    codes = tl.where(live, (found + ROUND) - ROUND, 0.0).to(tl.int32)
    if PER > 1:
        apart = tl.reshape(codes, (ROWS, CHANNELS // PER, PER))
        codes = tl.sum(apart << (tl.arange(0, PER) * BITS)[None, None, :], 2)
    return codes.to(tl.uint8)


@triton.jit
def tokens_kernel(
    x, codes, grid, heads, slots, size, each, room, batch_step, head_step, slot_step, intervals,
    shift, limit, top, SYMMETRIC: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Code some channels of one group of slots, each channel on a grid of its own."""
    PER: tl.constexpr = 8 // BITS
    group = tl.program_id(0).to(tl.int64)  # of all groups of all rows
    row = group // (slots // each)
    first = (group % (slots // each)) * each
    place = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = (place < each)[:, None] & (channel < size)[None, :]
    start = x + (row // heads) * batch_step + (row % heads) * head_step
    at = (first + place) * slot_step
    found = tl.load(start + at[:, None] + channel[None, :], mask=live, other=0.0).to(tl.float32)
    high = tl.max(tl.where(live, found, float("-inf")), 0)
    low = tl.min(tl.where(live, found, float("inf")), 0)
    bad = tl.max((found != found).to(tl.int32), 0)
    scale, low = grid_of(high, low, bad, intervals, limit, grid.dtype.element_ty, SYMMETRIC)
    PARTS: tl.constexpr = 1 if SYMMETRIC else 2
    to = grid + group * PARTS * size + channel
    tl.store(to, scale, mask=channel < size)
    step = scale.to(tl.float32)
    if SYMMETRIC:
        base = step * shift
    else:
        tl.store(to + size, low, mask=channel < size)
        base = low.to(tl.float32)
    packed = bytes_of(found, step[None, :], base[None, :], live, top, ROWS, CHANNELS, BITS)
    byte = tl.program_id(1) * (CHANNELS // PER) + tl.arange(0, CHANNELS // PER)
    here = (place < each)[:, None] & (byte < room)[None, :]
    tl.store(codes + (row * slots + first + place)[:, None] * room + byte[None, :], packed, mask=here)


@triton.jit
def channels_kernel(
    x, codes, grid, heads, slots, size, width, groups, room, batch_step, head_step, slot_step,
    intervals, shift, limit, top, SYMMETRIC: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Code some groups of channels of a row, each on a grid of its own; slots have `groups`."""
    PER: tl.constexpr = 8 // BITS
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = (number // groups).to(tl.int64)
    group = number % groups
    real = slot < slots
    inside = tl.arange(0, CHANNELS)
    channel = (group * width)[:, None] + inside[None, :]
    live = real[:, None] & (inside < width)[None, :] & (channel < size)
    at = (row // heads) * batch_step + (row % heads) * head_step + slot * slot_step
    found = tl.load(x + at[:, None] + channel, mask=live, other=0.0).to(tl.float32)
    high = tl.max(tl.where(live, found, float("-inf")), 1)
    low = tl.min(tl.where(live, found, float("inf")), 1)
    bad = tl.max((found != found).to(tl.int32), 1)
    scale, low = grid_of(high, low, bad, intervals, limit, grid.dtype.element_ty, SYMMETRIC)
    PARTS: tl.constexpr = 1 if SYMMETRIC else 2
    to = grid + (row * slots + slot) * PARTS * groups + group
    tl.store(to, scale, mask=real)
    step = scale.to(tl.float32)
    if SYMMETRIC:
        base = step * shift
    else:
        tl.store(to + groups, low, mask=real)
        base = low.to(tl.float32)
    packed = bytes_of(found, step[:, None], base[:, None], live, top, ROWS, CHANNELS, BITS)
    offset = tl.arange(0, CHANNELS // PER)
    byte = (group * width // PER)[:, None] + offset[None, :]
    here = real[:, None] & (offset * PER < width)[None, :] & (byte < room)
    tl.store(codes + (row * slots + slot)[:, None] * room + byte, packed, mask=here)


@triton.jit
def spread(packed, BITS: tl.constexpr):
    """Return the codes of bytes [N, W], as int32 [N, W * 8 / BITS]."""
    whole = packed.to(tl.int32)
    if BITS == 8:
        found = whole
    elif BITS == 4:
        found = tl.interleave(whole & 15, whole >> 4)
    else:
        even = tl.interleave(whole & 3, (whole >> 4) & 3)
        found = tl.interleave(even, tl.interleave((whole >> 2) & 3, whole >> 6))
    return found


@triton.jit
def restored(packed, scale, low, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers of bytes [N, W] whose channels share a grid, as [N, W * 8 / BITS]."""
    whole = packed.to(tl.int32)
    if BITS == 8:
        found = (whole * scale + low).to(dtype)
    elif BITS == 4:
        one = ((whole & 15) * scale + low).to(dtype)
        found = tl.interleave(one, ((whole >> 4) * scale + low).to(dtype))
    else:
        one = ((whole & 3) * scale + low).to(dtype)
        two = (((whole >> 2) & 3) * scale + low).to(dtype)
        three = (((whole >> 4) & 3) * scale + low).to(dtype)
        four = ((whole >> 6) * scale + low).to(dtype)
        found = tl.interleave(tl.interleave(one, three), tl.interleave(two, four))
    return found


@triton.jit
def restore_kernel(
    codes, grid, of, out, heads, slots, size, rows, each, width, columns, room, batch_step,
    head_step, slot_step, shift, LISTED: tl.constexpr, SYMMETRIC: tl.constexpr,
    TOKENS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Write the numbers of some bytes of some slots of a row."""
    PER: tl.constexpr = 8 // BITS
    row = tl.program_id(2).to(tl.int64)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = slot < slots
    number = row * slots + slot
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    here = there[:, None] & (byte < room)[None, :]
    packed = tl.load(codes + number[:, None] * room + byte[None, :], mask=here, other=0)
    line = tl.load(of + number, mask=there, other=0).to(tl.int64) if LISTED else slot // each
    PARTS: tl.constexpr = 1 if SYMMETRIC else 2
    start = grid + ((row * rows + line) * PARTS * columns)[:, None]
    channel = tl.program_id(1) * BYTES * PER + tl.arange(0, BYTES * PER)
    live = there[:, None] & (channel < size)[None, :]
    if TOKENS:
        at, known = start + channel[None, :], live
    else:
        at, known = start + (byte * PER // width)[None, :], here
    scale = tl.load(at, mask=known, other=0.0).to(tl.float32)
    if SYMMETRIC:
        low = scale * shift
    else:
        low = tl.load(at + columns, mask=known, other=0.0).to(tl.float32)
    if TOKENS:
        found = (spread(packed, BITS) * scale + low).to(out.dtype.element_ty)
    else:
        found = restored(packed, scale, low, BITS, out.dtype.element_ty)
    to = (row // heads) * batch_step + (row % heads) * head_step + slot.to(tl.int64) * slot_step
    tl.store(out + to[:, None] + channel[None, :], found, mask=live)


def quant_groups(
    x: Tensor, bits: int, each: int, width: int, intervals: float, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Launch `quant_groups`."""
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, slots, size = x.shape
    room = -(-size * bits // 8)
    columns = size if width == 1 else -(-size // width)
    codes = x.new_empty(batch, heads, slots, room, dtype=torch.uint8)
    grid = x.new_empty(batch, heads, slots // each, 2 - symmetric, columns, dtype=dtype)
    numbers = (*x.stride()[:3], intervals, -intervals / 2, torch.finfo(dtype).max, float(min(intervals, 2**bits - 1)))
    way = "tokens" if width == 1 else "channels"
    key = x.dtype, way, bits, max(each, width), size, x.numel()
    default = tokens_default(each, size) if width == 1 else DEFAULT
    form = tuned("quant_groups", key, default, x.device)
    if width == 1:
        block = tokens_block(each, size, form["TILE"])
        tokens_kernel[(batch * heads * slots // each, -(-size // block["CHANNELS"]))](
            x, codes, grid, heads, slots, size, each, room, *numbers, SYMMETRIC=symmetric,
            BITS=bits, **block, num_warps=form["num_warps"],
        )  # fmt: skip
        return codes, grid
    block = channels_block(min(width, size), bits, form["TILE"])
    channels_kernel[(-(-slots * columns // block["ROWS"]), batch * heads)](
        x, codes, grid, heads, slots, size, min(width, size), columns, room, *numbers,
        SYMMETRIC=symmetric, BITS=bits, **block, num_warps=form["num_warps"],
    )  # fmt: skip
    return codes, grid


def tokens_default(each: int, size: int) -> dict[str, int]:
    """Return the options of a launch that codes groups of `each` slots."""
    tile = triton.next_power_of_2(each) * min(triton.next_power_of_2(size), 64)
    # A maximum over slots is found within a thread where a warp has few threads for a channel.
    return {"TILE": tile, "num_warps": max(tile // 4096, 1)}


def tokens_block(each: int, size: int, tile: int) -> dict[str, int]:
    """Return the block of a program that codes groups of `each` slots, about `tile` numbers."""
    rows = triton.next_power_of_2(each)
    return {"ROWS": rows, "CHANNELS": max(min(triton.next_power_of_2(size), tile // rows), 4)}


def channels_block(width: int, bits: int, tile: int) -> dict[str, int]:
    """Return the block of a program that codes groups of `width` channels, about `tile` numbers."""
    channels = max(triton.next_power_of_2(width), 8 // bits)
    return {"ROWS": max(tile // channels, 1), "CHANNELS": channels}


def restore_block(room: int, bits: int, tile: int) -> dict[str, int]:
    """Return the block of a program that takes `tile` numbers back from slots of `room` bytes."""
    places = min(triton.next_power_of_2(room), 128)
    return {"ROWS": max(tile * bits // 8 // places, 1), "BYTES": places}


def dequant_groups(
    codes: Tensor, grid: Tensor, out: Tensor, bits: int, each: int, width: int, shift: float, of: Tensor | None
) -> None:
    """Launch `dequant_groups`."""
    codes, grid = codes.contiguous(), grid.contiguous()
    batch, heads, slots, room = codes.shape
    way = "tokens" if width == 1 else "channels"
    key = out.dtype, way, bits, room, codes.numel()
    form = tuned("dequant_groups", key, DEFAULT, codes.device)
    block = restore_block(room, bits, form["TILE"])
    restore_kernel[(-(-slots // block["ROWS"]), -(-room // block["BYTES"]), batch * heads)](
        codes, grid, codes if of is None else of.contiguous(), out, heads, slots, out.shape[3],
        grid.shape[2], each, width, grid.shape[4], room, *out.stride()[:3], shift,
        LISTED=of is not None, SYMMETRIC=grid.shape[3] == 1, TOKENS=width == 1, BITS=bits, **block,
        num_warps=form["num_warps"],
    )  # fmt: skip

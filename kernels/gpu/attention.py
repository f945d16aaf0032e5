"""Triton kernels of attention to slots as they are held, and of the attention that keys get.

Row r of the queries of a key-value head is query r // G of its query head r % G: keys and values
are read once for all heads of a group, and later rows see no fewer keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

PROGRAMS = 396  # three for each multiprocessor of a large device
SHARES = 64  # at most
CANDIDATES = {
    "attn_forward": combinations(KEYS=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3)),
    "attn_mass": combinations(ROWS=(64, 128), KEYS=(64, 128), num_warps=(4, 8)) + combinations(num_stages=(2, 4)),
}


@triton.jit
def read(
    held, grid, slot, there, row_size, grid_row, shift,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read slots of keys or values, [slots, WIDTH]; of codes, in float32."""
    cols = tl.arange(0, WIDTH)
    here = there[:, None] & (cols < SIZE)[None, :]
    if BITS == 0:
        found = tl.load(held + slot[:, None] * row_size + cols[None, :], mask=here, other=0.0)
    else:
        MANY: tl.constexpr = 8 // BITS
        unit = tl.arange(0, WIDTH // MANY)
        known = there[:, None] & (unit < SIZE // MANY)[None, :]
        code = tl.load(held + slot[:, None] * row_size + unit[None, :], mask=known, other=0.0)
        # Codes of a byte become neighbors: threads that hold bytes hold their channels.
        if MANY == 2:
            code = tl.reshape(tl.join(code & 15, code >> 4), (slot.shape[0], WIDTH))
        if MANY == 4:
            even = tl.join(code & 3, (code >> 4) & 3)
            odd = tl.join((code >> 2) & 3, code >> 6)
            code = tl.reshape(tl.join(even, odd), (slot.shape[0], WIDTH))
        line = grid + (slot // EACH)[:, None] * grid_row
        wide = tl.arange(0, WIDTH // GROUP)  # a scale for GROUP channels is read once, then spread
        known = there[:, None] & (wide < COLUMNS)[None, :]
        step = tl.load(line + wide[None, :], mask=known, other=0.0).to(tl.float32)
        if PARTS == 2:
            low = tl.load(line + COLUMNS + wide[None, :], mask=known, other=0.0).to(tl.float32)
        else:
            low = step * shift
        if GROUP > 1:
            step, low = spread(step, GROUP), spread(low, GROUP)
        found = code.to(tl.float32) * step + low
    return found


@triton.jit
def spread(x, COUNT: tl.constexpr):
    """Repeat every column of [N, M], as [N, M * COUNT]."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], COUNT))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * COUNT))


@triton.jit
def turned(x, turns, slot, there, row_size, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Turn pairs of channels by the cosines and sines of their slots, in float32."""
    HALF: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, HALF)
    at, here = turns + slot[:, None] * row_size + pair[None, :], there[:, None]
    if x.shape[1] > SIZE:
        here = here & (pair < SIZE // 2)[None, :]
    cos = tl.load(at, mask=here, other=0.0)
    sin = tl.load(at + SIZE // 2, mask=here, other=0.0)
    x = x.to(tl.float32)
    if INTERLEAVED:
        one, two = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
    else:
        one, two = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))
    both = tl.join(one * cos - two * sin, two * cos + one * sin)
    if not INTERLEAVED:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (x.shape[0], 2 * HALF))


@triton.jit
def seen_of(
    place, query, there, mask, m2, m3, offset, window, sinks, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Return which places queries see; places lie along one axis and queries along the other."""
    seen = there
    if CAUSAL:
        seen = seen & (place <= query + offset)
    if WINDOW:
        seen = seen & ((place > query + offset - window) | (place < sinks))
    if MASK:
        at = mask + query.to(tl.int64) * m2 + place.to(tl.int64) * m3
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def bounds(first_own, last_own, width, window, sinks, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the end of what some queries see, the start of their windows, and blocks of sinks."""
    stop, least, early = width, 0, 0
    if CAUSAL:
        stop = tl.minimum(width, tl.maximum(last_own + 1, 0))
    if WINDOW:
        least = tl.maximum(first_own - window + 1, 0)
        early = tl.cdiv(tl.minimum(sinks, stop), KEYS)
    return stop, least, early


@triton.jit
def forward_kernel(
    out, lse, q, k, key_grid, slots, mask, turns, v, value_grid, scale, offset, window, sinks,
    key_shift, value_shift, q0, q1, q2, k0, k1, k2, kg0, kg1, kg2, s0, s1, m0, m1, m2, m3, t0, t1,
    t2, v0, v1, v2, vg0, vg1, vg2, heads, count, width, held,
    SLOTS: tl.constexpr, MASK: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, KEY_BITS: tl.constexpr, KEY_EACH: tl.constexpr, KEY_GROUP: tl.constexpr,
    KEY_PARTS: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUES: tl.constexpr, VSIZE: tl.constexpr,
    VWIDTH: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_EACH: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_PARTS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS queries of a head to one share of the places."""
    share, both = tl.program_id(0), tl.program_id(2)
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    query, member = row // GROUPS, row % GROUPS
    live = query < count
    cols, vcols = tl.arange(0, WIDTH), tl.arange(0, VWIDTH)
    q += batch * q0 + head * GROUPS * q1
    k += batch * k0 + head * k1
    key_grid += batch * kg0 + head * kg1
    v += batch * v0 + head * v1
    value_grid += batch * vg0 + head * vg1
    slots += batch * s0 + head * s1
    mask += batch * m0 + head * m1
    turns += batch * t0 + head * t1
    where = member.to(tl.int64) * q1 + query.to(tl.int64) * q2
    here = live[:, None] & (cols < SIZE)[None, :]
    asked = tl.load(q + where[:, None] + cols[None, :], mask=here, other=0.0)
    first_own = offset + tl.program_id(1) * ROWS // GROUPS  # places of the first query and the last
    last_own = offset + tl.minimum((tl.program_id(1) * ROWS + ROWS - 1) // GROUPS, count - 1)
    stop, least, early = bounds(first_own, last_own, width, window, sinks, KEYS, CAUSAL, WINDOW)
    first = tl.maximum(least // KEYS, early)
    turn_count = early + tl.maximum(tl.cdiv(stop, KEYS) - first, 0)
    many = tl.cdiv(turn_count, tl.num_programs(0))
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VWIDTH], tl.float32)
    for turn in range(share * many, tl.minimum((share + 1) * many, turn_count)):
        # Blocks between sinks and window are passed over by number: a branch around loads would
        # keep them from being started early.
        block = turn + first - early
        if WINDOW:
            block = tl.where(turn < early, turn, block)
        place = block * KEYS + tl.arange(0, KEYS)
        there = place < stop
        if WINDOW:
            there = there & ((place >= least) | (place < sinks))
        slot = place.to(tl.int64)
        if SLOTS:
            slot = tl.load(slots + place, mask=there, other=-1).to(tl.int64)
            there = slot.to(tl.uint64, bitcast=True) < held  # a negative one is large
        key = read(k, key_grid, slot, there, k2, kg2, key_shift, SIZE, WIDTH, KEY_BITS, KEY_EACH,
                   KEY_GROUP, KEY_PARTS, KEY_COLUMNS)  # fmt: skip
        if TURNS:
            key = turned(key, turns, slot, there, t2, SIZE, INTERLEAVED)
        key = key.to(asked.dtype)
        logit = tl.dot(asked, tl.trans(key), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = seen_of(place[None, :], query[:, None], there[None, :] & live[:, None], mask, m2, m3,
                       offset, window, sinks, CAUSAL, WINDOW, MASK)  # fmt: skip
        logit = tl.where(seen, logit, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        old, weight = tl.exp2(top - safe), tl.exp2(logit - safe[:, None])
        mass = mass * old + tl.sum(weight, 1)
        if VALUES:
            if MASK:  # what the mask hides from all may be NaN, and 0 times NaN is NaN
                there = there & (tl.max(seen.to(tl.int32), 0) > 0)
            value = read(v, value_grid, slot, there, v2, vg2, value_shift, VSIZE, VWIDTH,
                         VALUE_BITS, VALUE_EACH, VALUE_GROUP, VALUE_PARTS,
                         VALUE_COLUMNS)  # fmt: skip
            value = value.to(asked.dtype)
            total = total * old[:, None]
            total += tl.dot(weight.to(asked.dtype), value, input_precision="ieee")
        top = new
    some = tl.where(mass == 0, 1.0, mass)  # NaN stays
    before = (share.to(tl.int64) * tl.num_programs(2) + both) * GROUPS * count
    at = before + member * count + query
    if VALUES:
        there = live[:, None] & (vcols < VSIZE)[None, :]
        found = (total / some[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * VSIZE + vcols[None, :], found, mask=there)
    tl.store(lse + at, (top + tl.log2(some)) * 0.6931471805599453, mask=live)


@triton.jit
def combine_kernel(out, lse, parts, logs, rows, shares, SHARES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the shares of one row."""
    row = tl.program_id(0).to(tl.int64)
    share, cols = tl.arange(0, SHARES).to(tl.int64), tl.arange(0, WIDTH)
    live = share < shares
    log = tl.load(logs + share * rows + row, mask=live, other=-float("inf"))
    top = tl.max(log, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp(log - safe)
    mass = tl.sum(weight, 0)
    some = tl.where(mass == 0, 1.0, mass)
    if SIZE > 0:
        part = tl.load(
            parts + (share * rows + row)[:, None] * SIZE + cols[None, :],
            mask=live[:, None] & (cols < SIZE)[None, :],
            other=0.0,
        )
        found = tl.sum(part * weight[:, None], 0) / some
        tl.store(out + row * SIZE + cols, found.to(out.dtype.element_ty), mask=cols < SIZE)
    tl.store(lse + row, top + tl.log(some))


@triton.jit
def mass_kernel(
    out, lse, q, k, key_grid, slots, mask, turns, scale, offset, window, sinks, key_shift,
    q0, q1, q2, k0, k1, k2, kg0, kg1, kg2, s0, s1, m0, m1, m2, m3, t0, t1, t2,
    heads, count, width, held,
    SLOTS: tl.constexpr, MASK: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, KEY_BITS: tl.constexpr, KEY_EACH: tl.constexpr, KEY_GROUP: tl.constexpr,
    KEY_PARTS: tl.constexpr, KEY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add up the attention that KEYS keys get; they stay while queries go by."""
    both = tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    place, cols = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    there, slot = place < width, place.to(tl.int64)
    if SLOTS:
        slot = tl.load(slots + batch * s0 + head * s1 + place, mask=there, other=-1).to(tl.int64)
        there = slot.to(tl.uint64, bitcast=True) < held
    key = read(k + batch * k0 + head * k1, key_grid + batch * kg0 + head * kg1, slot, there, k2,
               kg2, key_shift, SIZE, WIDTH, KEY_BITS, KEY_EACH, KEY_GROUP, KEY_PARTS,
               KEY_COLUMNS)  # fmt: skip
    if TURNS:
        key = turned(key, turns + batch * t0 + head * t1, slot, there, t2, SIZE, INTERLEAVED)
    key = key.to(q.dtype.element_ty)
    q += batch * q0 + head * GROUPS * q1
    mask += batch * m0 + head * m1
    lse += both.to(tl.int64) * GROUPS * count
    first, stop = 0, tl.cdiv(count * GROUPS, ROWS)
    if CAUSAL:  # the first block with a query that sees one of these keys
        first = tl.maximum(tl.program_id(0) * KEYS - offset, 0) * GROUPS // ROWS
    if WINDOW:  # ... and the last
        last = tl.program_id(0) * KEYS + KEYS - 2 + window - offset
        near = tl.cdiv(tl.maximum(last + 1, 0) * GROUPS, ROWS)
        stop = tl.where(tl.program_id(0) * KEYS < sinks, stop, tl.minimum(stop, near))
    total = tl.zeros([KEYS], tl.float32)
    for block in range(first, stop):
        row = block * ROWS + tl.arange(0, ROWS)
        live = row // GROUPS < count  # others repeat the last query, as 0 times infinity is NaN
        query, member = tl.minimum(row // GROUPS, count - 1), row % GROUPS
        at = member.to(tl.int64) * q1 + query.to(tl.int64) * q2
        asked = tl.load(q + at[None, :] + cols[:, None], mask=(cols < SIZE)[:, None], other=0.0)
        log = tl.load(lse + member * count + query, mask=live, other=float("inf"))
        log = tl.where(log == -float("inf"), float("inf"), log)  # a query that sees nothing
        logit = tl.dot(key, asked, input_precision="ieee") * scale
        part = tl.exp2((logit - log[None, :]) * 1.4426950408889634)
        seen = seen_of(place[:, None], query[None, :], there[:, None] & live[None, :], mask, m2, m3,
                       offset, window, sinks, CAUSAL, WINDOW, MASK)  # fmt: skip
        total += tl.sum(tl.where(seen, part, 0.0), 1)
    tl.store(out + both.to(tl.int64) * width + place, total, mask=place < width)


def attn_forward(
    q: Tensor, k: Tensor, key_grid: Tensor | None, slots: Tensor | None, mask: Tensor | None,
    turns: Tensor | None, v: Tensor | None, value_grid: Tensor | None, scale: float,
    interleaved: bool, offset: int | None, window: int, sinks: int, key_form: list[int],
    key_shift: float, value_form: list[int], value_shift: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `attn_forward`; shares are merged by a second kernel where there are several."""
    q = q if q.stride(3) == 1 else q.contiguous()
    (batch, asking, count, size), heads = q.shape, k.shape[1]
    width = k.shape[2] if slots is None else slots.shape[2]
    values, more, constants = _held(q, q[:, :1] if v is None else v, value_grid, value_form)
    constants = {f"VALUE_{name}": value for name, value in constants.items()}
    last, wide = constants.pop("VALUE_SIZE") if v is not None else 0, constants.pop("VALUE_WIDTH")
    constants.pop("VALUE_SIZE", 0)
    rows, coded = asking // heads * count, bool(key_form or value_form or turns is not None)
    options = tuned(
        "attn_forward",
        (q.dtype, max(size, last), rows, width, *(["coded"] if coded else [])),
        tiles(q.dtype, max(size, last), rows, coded),
        q.device,
    )
    tiled = triton.cdiv(rows, options["ROWS"])
    near = min(width, window + count + sinks + 2 * options["KEYS"]) if window else width
    most = min(triton.cdiv(near, 2 * options["KEYS"]), SHARES)
    shares = max(min(PROGRAMS // (tiled * batch * heads), most), 1)
    out, lse = q.new_empty((*q.shape[:3], last)), q.new_empty(q.shape[:3], dtype=torch.float32)
    parts, logs = out, lse
    if shares > 1:
        parts, logs = (x.new_empty((shares, *x.shape), dtype=torch.float32) for x in (out, lse))
    seen, steps, known = _seen(q, k, key_grid, slots, mask, turns, key_form)
    forward_kernel[(shares, tiled, batch * heads)](
        parts, logs, q, *seen, *values, scale, offset or 0, window, sinks, key_shift, value_shift,
        *steps, *more, heads, count, width, k.shape[2], **known, **constants,
        CAUSAL=offset is not None, WINDOW=window > 0, INTERLEAVED=interleaved,
        VALUES=v is not None, VSIZE=last, VWIDTH=wide, **options,
    )  # fmt: skip
    if shares > 1:
        combine_kernel[(lse.numel(),)](
            out,
            lse,
            parts,
            logs,
            lse.numel(),
            shares,
            SHARES=triton.next_power_of_2(shares),
            SIZE=last,
            WIDTH=wide,
            num_warps=4,
        )
    return out, lse


def attn_mass(
    q: Tensor, k: Tensor, key_grid: Tensor | None, slots: Tensor | None, mask: Tensor | None,
    turns: Tensor | None, lse: Tensor, scale: float, interleaved: bool, offset: int | None,
    window: int, sinks: int, key_form: list[int], key_shift: float,
) -> Tensor:  # fmt: skip
    """Launch `attn_mass`."""
    q = q if q.stride(3) == 1 else q.contiguous()
    width, coded = k.shape[2] if slots is None else slots.shape[2], bool(key_form)
    options = tuned(
        "attn_mass",
        (q.dtype, q.shape[3], q.shape[2], width, *(["coded"] if coded else [])),
        mass_tiles(q.dtype, q.shape[3]),
        q.device,
    )
    out = q.new_empty((len(q), k.shape[1], width), dtype=torch.float32)
    seen, steps, known = _seen(q, k, key_grid, slots, mask, turns, key_form)
    mass_kernel[(triton.cdiv(width, options["KEYS"]), len(q) * k.shape[1])](
        out, lse.contiguous(), q, *seen, scale, offset or 0, window, sinks, key_shift, *steps,
        k.shape[1], q.shape[2], width, k.shape[2], **known, CAUSAL=offset is not None,
        WINDOW=window > 0, INTERLEAVED=interleaved, **options,
    )  # fmt: skip
    return out


def tiles(dtype: torch.dtype, size: int, rows: int, coded: bool) -> dict[str, int]:
    """Return the sizes of tiles, by dtype, channels of a head and rows of a key-value head."""
    wide = dtype == torch.float32
    small = wide or size > 128 or coded
    most = 16 if wide else 64 if size > 128 else 128  # what fits registers
    tall = min(max(triton.next_power_of_2(rows), 16), most)
    return {
        "ROWS": tall,
        "KEYS": 16 if wide and coded else 32 if small else 64,
        "num_warps": 8 if wide or tall > 16 else 4,
        "num_stages": 2 if small else 3,
    }


def mass_tiles(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return the sizes of the tiles of `attn_mass`, by dtype and channels of a head."""
    rows, keys, stages = 64, 128, 3
    if size > 128:
        keys, stages = 64, 2
    if dtype == torch.float32:  # larger ones do not fit registers
        rows, keys, stages = 32, 32, 2
    return {"ROWS": rows, "KEYS": keys, "num_warps": 8, "num_stages": stages}


def _held(
    q: Tensor, x: Tensor, grid: Tensor | None, form: list[int]
) -> tuple[list[Tensor], list[int], dict[str, int]]:
    """Return keys or values and their grid, strides of both, and constants."""
    x = x if x.stride(3) == 1 else x.contiguous()
    bits, each, group = form or (0, 1, 1)
    size = x.shape[3] * 8 // bits if bits else x.shape[3]
    wide = max(triton.next_power_of_2(size), 16)
    grid = x[..., None] if grid is None else grid.contiguous()
    x, grid = (one.expand(len(q), *one.shape[1:]) for one in (x, grid))
    constants = {
        "SIZE": size,
        "WIDTH": wide,
        "BITS": bits,
        "EACH": each,
        "GROUP": wide if group >= size else group,  # a power of two, as all of a block's sides
        "PARTS": grid.shape[3],
        "COLUMNS": grid.shape[4],
    }
    if not bits:
        constants |= {"PARTS": 1, "COLUMNS": 1}
    return [x, grid], [*x.stride()[:3], *grid.stride()[:3]], constants


def _seen(
    q: Tensor,
    k: Tensor,
    grid: Tensor | None,
    slots: Tensor | None,
    mask: Tensor | None,
    turns: Tensor | None,
    form: list[int],
) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    """Return keys and limits, the strides of queries and of these, and constants."""
    (batch, asking, count, _), heads = q.shape, k.shape[1]
    tensors, strides, constants = _held(q, k, grid, form)
    known = {
        "SLOTS": slots is not None,
        "MASK": mask is not None,
        "TURNS": turns is not None,
        "GROUPS": asking // heads,
        "SIZE": constants.pop("SIZE"),
        "WIDTH": constants.pop("WIDTH"),
    }
    known |= {f"KEY_{name}": value for name, value in constants.items()}
    more = [0] * 9
    if slots is not None:
        slots = slots.contiguous().expand(batch, heads, -1)
        more[:2] = slots.stride()[:2]
    if mask is not None:
        mask = mask.expand(batch, heads, count, -1).view(torch.uint8)
        more[2:6] = mask.stride()
    if turns is not None:
        turns = turns.contiguous().expand(batch, heads, -1, -1)
        more[6:] = turns.stride()[:3]
    extra = [tensors[0] if one is None else one for one in (slots, mask, turns)]
    return [*tensors, *extra], [*q.stride()[:3], *strides, *more], known

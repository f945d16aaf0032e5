"""Triton kernels of attention of a few queries: one for shares of the keys, one that merges them.

Row r of the queries of a key-value head is query r // G of its query head r % G: keys and values
are read once for all heads of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

PROGRAMS = 396  # three for each multiprocessor of a large device
SHARES = 64  # at most
CANDIDATES = {"attn_decode": combinations(KEYS=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3))}


@triton.jit
def decode_kernel(
    out, lse, q, k, v, slots, scale, q0, q1, q2, k0, k1, k2, v0, v1, v2, s0, s1,
    heads, count, width, held, offset, window,
    SLOTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, VSIZE: tl.constexpr,
    VWIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
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
    v += batch * v0 + head * v1
    where = member.to(tl.int64) * q1 + query.to(tl.int64) * q2
    here = live[:, None] & (cols < SIZE)[None, :]
    asked = tl.load(q + where[:, None] + cols[None, :], mask=here, other=0.0)
    own = offset + query
    stop, least = width, 0
    if CAUSAL:
        stop = tl.minimum(width, offset + count)
    if WINDOW:
        least = tl.maximum(offset + tl.program_id(1) * ROWS // GROUPS - window + 1, 0)
    first = least // KEYS  # where the loop begins: no branch stands around the loads
    turns = tl.maximum(tl.cdiv(stop, KEYS) - first, 0)
    many = tl.cdiv(turns, tl.num_programs(0))
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VWIDTH], tl.float32)
    for turn in range(share * many, tl.minimum((share + 1) * many, turns)):
        place = (first + turn) * KEYS + tl.arange(0, KEYS)
        there = place < stop
        if WINDOW:
            there = there & (place >= least)
        slot = place.to(tl.int64)
        if SLOTS:
            slot = tl.load(slots + batch * s0 + head * s1 + place, mask=there, other=-1)
            slot = slot.to(tl.int64)
            there = slot.to(tl.uint64, bitcast=True) < held  # a negative one is large
        key = tl.load(
            k + slot[None, :] * k2 + cols[:, None],
            mask=there[None, :] & (cols < SIZE)[:, None], other=0.0,
        )  # fmt: skip
        value = tl.load(
            v + slot[:, None] * v2 + vcols[None, :],
            mask=there[:, None] & (vcols < VSIZE)[None, :], other=0.0,
        )  # fmt: skip
        logit = tl.dot(asked, key, input_precision="ieee") * (scale * 1.4426950408889634)
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (place[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & (place[None, :] > (own - window)[:, None])
        logit = tl.where(seen, logit, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        old, weight = tl.exp2(top - safe), tl.exp2(logit - safe[:, None])
        mass = mass * old + tl.sum(weight, 1)
        total = total * old[:, None]
        total += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new
    some = tl.where(mass == 0, 1.0, mass)  # NaN stays
    before = (share.to(tl.int64) * tl.num_programs(2) + both) * GROUPS * count
    at = before + member * count + query
    there = live[:, None] & (vcols < VSIZE)[None, :]
    found = (total / some[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * VSIZE + vcols[None, :], found, mask=there)
    tl.store(lse + at, (top + tl.log2(some)) * 0.6931471805599453, mask=live)


@triton.jit
def combine_kernel(
    out, lse, parts, logs, rows, shares,
    SHARES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
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
    part = tl.load(
        parts + (share * rows + row)[:, None] * SIZE + cols[None, :],
        mask=live[:, None] & (cols < SIZE)[None, :], other=0.0,
    )  # fmt: skip
    found = tl.sum(part * weight[:, None], 0) / some
    tl.store(out + row * SIZE + cols, found.to(out.dtype.element_ty), mask=cols < SIZE)
    tl.store(lse + row, top + tl.log(some))


def attn_decode(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slots: Tensor | None, offset: int | None,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `attn_decode`; shares are merged by a second kernel where there are several."""
    batch, asking, count, size = q.shape
    heads, held, last = k.shape[1], k.shape[2], v.shape[3]
    width = held if slots is None else slots.shape[2]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    k, v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    listed = [0, 0]
    if slots is not None:
        slots = slots.contiguous().expand(batch, heads, -1)
        listed = [*slots.stride()[:2]]
    key = q.dtype, max(size, last), asking // heads * count, width
    options = tuned("attn_decode", key, tiles(*key[:3]), q.device)
    tiled = triton.cdiv(asking // heads * count, options["ROWS"])
    read = min(width, window + count + 2 * options["KEYS"]) if window else width
    most = min(triton.cdiv(read, 2 * options["KEYS"]), SHARES)
    shares = max(min(PROGRAMS // (tiled * batch * heads), most), 1)
    out, lse = q.new_empty((*q.shape[:3], last)), q.new_empty(q.shape[:3], dtype=torch.float32)
    parts, logs = out, lse
    if shares > 1:
        parts, logs = (x.new_empty((shares, *x.shape), dtype=torch.float32) for x in (out, lse))
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *listed]
    widths = [max(triton.next_power_of_2(x), 16) for x in (size, last)]
    decode_kernel[(shares, tiled, batch * heads)](
        parts, logs, q, k, v, logs if slots is None else slots, scale, *strides,
        heads, count, width, held, offset or 0, window,
        SLOTS=slots is not None, CAUSAL=offset is not None, WINDOW=window > 0,
        GROUPS=asking // heads, SIZE=size, WIDTH=widths[0], VSIZE=last, VWIDTH=widths[1], **options,
    )  # fmt: skip
    if shares > 1:
        combine_kernel[(lse.numel(),)](
            out, lse, parts, logs, lse.numel(), shares,
            SHARES=triton.next_power_of_2(shares), SIZE=last, WIDTH=widths[1], num_warps=4,
        )  # fmt: skip
    return out, lse


def tiles(dtype: torch.dtype, size: int, rows: int) -> dict[str, int]:
    """Return the sizes of tiles, by dtype, channels of a head and rows of a key-value head."""
    wide = dtype == torch.float32
    small = wide or size > 128
    tall = min(max(triton.next_power_of_2(rows), 16), 16 if wide else 64)  # what fits registers
    return {
        "ROWS": tall, "KEYS": 32 if small else 64, "num_warps": 8 if wide or tall > 16 else 4,
        "num_stages": 2 if small else 3,
    }  # fmt: skip

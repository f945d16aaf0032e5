"""Triton kernels of the log-sum-exps of queries and of the attention that keys get.

Row r of the queries of a key head is query r // G of its query head r % G, so that all heads of a
group are in one product with the keys, and later rows see no fewer keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

CANDIDATES = dict.fromkeys(
    ("attn_lse", "attn_mass"),
    combinations(ROWS=(64, 128), KEYS=(64, 128), num_warps=(4, 8))
    + combinations(num_stages=(2, 4)),
)
PROGRAMS = 264  # two for each multiprocessor of a large device


@triton.jit
def lse_kernel(
    out, q, k, scale, offset, q0, q1, q2, k0, k1, k2, heads, count, width,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Take the log-sum-exp of ROWS queries of a key head over one share of the keys."""
    share, both = tl.program_id(2), tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, member = row // GROUPS, row % GROUPS
    live = query < count
    cols = tl.arange(0, WIDTH)
    q += batch * q0 + head * GROUPS * q1
    k += batch * k0 + head * k1
    place = member.to(tl.int64) * q1 + query.to(tl.int64) * q2
    here = live[:, None] & (cols < SIZE)[None, :]
    asked = tl.load(q + place[:, None] + cols[None, :], mask=here, other=0.0)
    reach = width
    if CAUSAL:
        last = tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // GROUPS, count - 1)
        reach = tl.minimum(width, tl.maximum(last + offset + 1, 0))
    blocks = tl.cdiv(reach, KEYS)
    many = tl.cdiv(blocks, tl.num_programs(2))
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for block in range(share * many, tl.minimum((share + 1) * many, blocks)):
        key = block * KEYS + tl.arange(0, KEYS)
        there = (key < width)[None, :] & (cols < SIZE)[:, None]
        held = tl.load(k + key[None, :].to(tl.int64) * k2 + cols[:, None], mask=there, other=0.0)
        logit = tl.dot(asked, held, input_precision="ieee") * (scale * 1.4426950408889634)
        seen = (key < width)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= (query + offset)[:, None])
        logit = tl.where(seen, logit, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        mass = mass * tl.exp2(top - safe) + tl.sum(tl.exp2(logit - safe[:, None]), 1)
        top = new
    found = (top + tl.log2(tl.where(mass == 0, 1.0, mass))) * 0.6931471805599453
    out += (share.to(tl.int64) * tl.num_programs(1) + both) * GROUPS * count
    tl.store(out + member * count + query, found, mask=live)


@triton.jit
def mass_kernel(
    out, q, k, lse, scale, offset, q0, q1, q2, k0, k1, k2, heads, count, width,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add up the attention that KEYS keys get; they stay while queries go by."""
    both = tl.program_id(1)
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    cols = tl.arange(0, WIDTH)
    there = (key < width)[:, None] & (cols < SIZE)[None, :]
    k += batch * k0 + head * k1
    held = tl.load(k + key[:, None].to(tl.int64) * k2 + cols[None, :], mask=there, other=0.0)
    q += batch * q0 + head * GROUPS * q1
    lse += both.to(tl.int64) * GROUPS * count
    first = 0
    if CAUSAL:  # the first block with a query that sees one of these keys
        first = tl.maximum(tl.program_id(0) * KEYS - offset, 0) * GROUPS // ROWS
    total = tl.zeros([KEYS], tl.float32)
    for block in range(first, tl.cdiv(count * GROUPS, ROWS)):
        row = block * ROWS + tl.arange(0, ROWS)
        live = row // GROUPS < count  # others repeat the last query, as 0 times infinity is NaN
        query, member = tl.minimum(row // GROUPS, count - 1), row % GROUPS
        place = member.to(tl.int64) * q1 + query.to(tl.int64) * q2
        asked = tl.load(q + place[None, :] + cols[:, None], mask=(cols < SIZE)[:, None], other=0.0)
        log = tl.load(lse + member * count + query, mask=live, other=float("inf"))
        log = tl.where(log == -float("inf"), float("inf"), log)  # a query that sees nothing
        logit = tl.dot(held, asked, input_precision="ieee") * scale
        part = tl.exp2((logit - log[None, :]) * 1.4426950408889634)
        if CAUSAL:
            part = tl.where(key[:, None] <= (query + offset)[None, :], part, 0.0)
        total += tl.sum(part, 1)
    tl.store(out + both.to(tl.int64) * width + key, total, mask=key < width)


def attn_lse(q: Tensor, k: Tensor, scale: float, offset: int | None) -> Tensor:
    """Launch `attn_lse`, with the keys in shares where there are few queries."""
    settings = _settings("attn_lse", q, k)
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    grid = triton.cdiv(rows, settings["ROWS"]), len(q) * k.shape[1]
    most = triton.cdiv(k.shape[2], 4 * settings["KEYS"])
    shares = max(min(PROGRAMS // (grid[0] * grid[1]), most), 1)
    out = q.new_empty((shares, *q.shape[:3]), dtype=torch.float32)
    given, constants = _given(q, k, [], scale, offset)
    lse_kernel[grid[0], grid[1], shares](out, *given, **constants, **settings)
    return out[0] if shares == 1 else out.logsumexp(0)


def attn_mass(q: Tensor, k: Tensor, lse: Tensor, scale: float, offset: int | None) -> Tensor:
    """Launch `attn_mass`."""
    settings = _settings("attn_mass", q, k)
    out = q.new_empty((len(q), *k.shape[1:3]), dtype=torch.float32)
    grid = triton.cdiv(k.shape[2], settings["KEYS"]), len(q) * k.shape[1]
    given, constants = _given(q, k, [lse.contiguous()], scale, offset)
    mass_kernel[grid](out, *given, **constants, **settings)
    return out


def tiles(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return the sizes of the tiles of both kernels, by dtype and channels of a head."""
    rows, keys, stages = 64, 128, 3
    if size > 128:
        keys, stages = 64, 2
    if dtype == torch.float32:  # larger ones do not fit registers
        rows, keys, stages = 32, 32, 2
    return {"ROWS": rows, "KEYS": keys, "num_warps": 8, "num_stages": stages}


def _settings(name: str, q: Tensor, k: Tensor) -> dict[str, int]:
    key = q.dtype, q.shape[3], q.shape[2], k.shape[2]
    return tuned(name, key, tiles(q.dtype, q.shape[3]), q.device)


def _given(
    q: Tensor, k: Tensor, more: list[Tensor], scale: float, offset: int | None
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments and constants of both kernels."""
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    k = k.expand(len(q), -1, -1, -1)
    numbers = [*q.stride()[:3], *k.stride()[:3], k.shape[1], q.shape[2], k.shape[2]]
    size = q.shape[3]
    constants = {
        "CAUSAL": offset is not None, "GROUPS": q.shape[1] // k.shape[1], "SIZE": size,
        "WIDTH": max(triton.next_power_of_2(size), 16),
    }  # fmt: skip
    return [q, k, *more, scale, offset or 0, *numbers], constants

"""Triton kernels that move keys and values of slots, both in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

DEFAULT = {"BLOCK": 2048, "num_warps": 4}  # numbers of keys, and of values, that a program moves
CANDIDATES = dict.fromkeys(
    ("kv_scatter", "kv_gather"), combinations(BLOCK=(512, 1024, 2048, 4096), num_warps=(2, 4, 8))
)


@triton.jit
def copy_rows(target, source, live, there, size, WIDTH: tl.constexpr):
    """Copy vectors; those that are not there are zeros."""
    channel = tl.arange(0, WIDTH)[None, :]
    value = tl.load(source + channel, mask=there & (channel < size), other=0.0)
    tl.store(target + channel, value, mask=live & (channel < size))


@triton.jit
def scatter_kernel(
    k, v, new_k, new_v, index, count, slots, k_size, v_size,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot,
    new_k_batch, new_k_head, new_k_slot, new_v_batch, new_v_head, new_v_slot, index_batch,
    ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write some new slots of one head over those that the index names."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.load(index + batch * index_batch + row, mask=row < count, other=-1)
    there = (at >= 0) & (at < slots)
    copy_rows(
        k + batch * k_batch + head * k_head + at * k_slot,
        new_k + batch * new_k_batch + head * new_k_head + row * new_k_slot,
        there,
        there,
        k_size,
        K,
    )
    copy_rows(
        v + batch * v_batch + head * v_head + at * v_slot,
        new_v + batch * new_v_batch + head * new_v_head + row * new_v_slot,
        there,
        there,
        v_size,
        V,
    )


@triton.jit
def gather_kernel(
    found_k, found_v, k, v, index, count, slots, heads, k_size, v_size,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot, index_batch, index_head,
    ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Copy the slots of one head that the index names."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < count
    at = tl.load(index + batch * index_batch + head * index_head + row, mask=live, other=-1)
    there = (at >= 0) & (at < slots)
    place = (batch * heads + head) * count + row
    copy_rows(found_k + place * k_size, k + batch * k_batch + head * k_head + at * k_slot, live, there, k_size, K)
    copy_rows(found_v + place * v_size, v + batch * v_batch + head * v_head + at * v_slot, live, there, v_size, V)


def kv_scatter(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, index: Tensor) -> None:
    """Launch `kv_scatter`."""
    new_k, new_v, index = (_whole(x) for x in (new_k, new_v, index))
    batch, heads, count = new_k.shape[:3]
    options = sizes("kv_scatter", k, v, count)
    scatter_kernel[(triton.cdiv(count, options["ROWS"]), heads, batch)](
        k, v, new_k, new_v, index, count, k.shape[2], k.shape[3], v.shape[3],
        *_steps(k), *_steps(v), *_steps(new_k), *_steps(new_v),
        index.stride(0) if index.dim() == 2 else 0, **options,
    )  # fmt: skip


def kv_gather(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `kv_gather`."""
    k, v, index = (_whole(x) for x in (k, v, index))
    (batch, _, count), heads = index.shape, k.shape[1]
    found_k, found_v = (x.new_empty(batch, heads, count, x.shape[3]) for x in (k, v))
    options = sizes("kv_gather", k, v, count)
    gather_kernel[(triton.cdiv(count, options["ROWS"]), heads, batch)](
        found_k, found_v, k, v, index, count, k.shape[2], heads, k.shape[3], v.shape[3],
        *_steps(k), *_steps(v), index.stride(0), index.stride(1) if index.shape[1] > 1 else 0,
        **options,
    )  # fmt: skip
    return found_k, found_v


def sizes(name: str, k: Tensor, v: Tensor, count: int) -> dict[str, Any]:
    """Return the constants of a launch of an operator that moves `count` vectors of a head."""
    wide = [triton.next_power_of_2(x.shape[3]) for x in (k, v)]
    form = tuned(name, (k.dtype, *wide, count), DEFAULT, k.device)
    rows = max(form["BLOCK"] // max(wide), 1)
    return {"ROWS": rows, "K": wide[0], "V": wide[1], "num_warps": form["num_warps"]}


def _steps(x: Tensor) -> tuple[int, ...]:
    """Return the strides of rows, heads and slots, 0 where they share one."""
    return tuple(x.stride()[:3])


def _whole(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is whole in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()

"""Triton kernel that merges parts of attention: one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.gpu.launch import programs
from diffcache.kernels.merge import MOST

DEFAULT = {"BLOCK": 2048, "num_warps": 4}  # elements of a part that a program merges
CANDIDATES = {"lse_merge": combinations(BLOCK=(1024, 2048, 4096), num_warps=(4, 8))}


@triton.jit
def add_part(total, mass, top, out, lse, at, rows, live, here):
    """Add a part to running sums that are relative to the largest log-sum-exp so far."""
    log = tl.load(lse + rows, mask=live, other=-float("inf"))
    new = tl.maximum(top, log)
    safe = tl.where(new == -float("inf"), 0.0, new)
    old, weight = tl.exp(top - safe), tl.exp(log - safe)
    part = tl.load(out + at, mask=here, other=0.0).to(tl.float32)
    return total * old[:, None] + part * weight[:, None], mass * old + weight, new


@triton.jit
def merge_kernel(
    out, lse, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7, count,
    PARTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of SIZE elements; WIDTH is the next power of two."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)
    live = rows < count
    here = live[:, None] & (cols < SIZE)[None, :]
    at = rows[:, None] * SIZE + cols[None, :]
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, mass, top = add_part(total, mass, top, o0, l0, at, rows, live, here)
    total, mass, top = add_part(total, mass, top, o1, l1, at, rows, live, here)
    if PARTS > 2:
        total, mass, top = add_part(total, mass, top, o2, l2, at, rows, live, here)
    if PARTS > 3:
        total, mass, top = add_part(total, mass, top, o3, l3, at, rows, live, here)
    if PARTS > 4:
        total, mass, top = add_part(total, mass, top, o4, l4, at, rows, live, here)
    if PARTS > 5:
        total, mass, top = add_part(total, mass, top, o5, l5, at, rows, live, here)
    if PARTS > 6:
        total, mass, top = add_part(total, mass, top, o6, l6, at, rows, live, here)
    if PARTS > 7:
        total, mass, top = add_part(total, mass, top, o7, l7, at, rows, live, here)
    some = tl.where(mass == 0, 1.0, mass)  # NaN stays
    found = total / some[:, None]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=here)
    tl.store(lse + rows, top + tl.log(some), mask=live)


def lse_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Launch `lse_merge`."""
    first, log = outs[0], lses[0]
    out = first.new_empty(first.shape, dtype=torch.promote_types(first.dtype, log.dtype))
    lse = log.new_empty(log.shape)
    size, spare = first.shape[-1], MOST - len(outs)
    width = triton.next_power_of_2(size)
    key = first.dtype, len(outs), width, lse.numel()
    form = tuned("lse_merge", key, DEFAULT, first.device)
    rows = max(form["BLOCK"] // width, 1)
    here, logs = ([each.contiguous() for each in given] for given in (outs, lses))
    merge_kernel[programs(lse.numel(), rows)](
        out, lse, *here, *here[:1] * spare, *logs, *logs[:1] * spare, lse.numel(), PARTS=len(outs),
        SIZE=size, ROWS=rows, WIDTH=width, num_warps=form["num_warps"],
    )  # fmt: skip
    return out, lse

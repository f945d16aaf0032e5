"""Triton kernels of weighted sums and of finite differences: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned
from diffcache.kernels.forecast import MOST
from diffcache.kernels.gpu.launch import aligned, programs

DEFAULT = {"BLOCK": 2048, "num_warps": 4}
CANDIDATES = dict.fromkeys(
    ("weighted_sum", "finite_differences"), combinations(BLOCK=(1024, 2048, 4096), num_warps=(4, 8))
)


@triton.jit
def sum_kernel(
    out, t0, t1, t2, t3, t4, base, gate, size, w0, w1, w2, w3, w4,
    COUNT: tl.constexpr, BASE: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the terms of a block of elements in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = w0 * tl.load(t0 + at, mask=live).to(tl.float32)
    if COUNT > 1:
        total += w1 * tl.load(t1 + at, mask=live).to(tl.float32)
    if COUNT > 2:
        total += w2 * tl.load(t2 + at, mask=live).to(tl.float32)
    if COUNT > 3:
        total += w3 * tl.load(t3 + at, mask=live).to(tl.float32)
    if COUNT > 4:
        total += w4 * tl.load(t4 + at, mask=live).to(tl.float32)
    if GATE:
        total *= tl.load(gate + at, mask=live).to(tl.float32)
    if BASE:
        total += tl.load(base + at, mask=live).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def differences_kernel(
    feature, o0, o1, o2, o3, r0, r1, r2, r3, size, s0, s1, s2, s3, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Take the differences of a block; all old ones are read before a new one is written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    fresh = tl.load(feature + at, mask=live).to(tl.float32)
    d0 = (fresh - tl.load(o0 + at, mask=live).to(tl.float32)) * s0
    if COUNT > 1:
        d1 = (d0 - tl.load(o1 + at, mask=live).to(tl.float32)) * s1
    if COUNT > 2:
        d2 = (d1 - tl.load(o2 + at, mask=live).to(tl.float32)) * s2
    if COUNT > 3:
        d3 = (d2 - tl.load(o3 + at, mask=live).to(tl.float32)) * s3
        tl.store(r3 + at, d3.to(r3.dtype.element_ty), mask=live)
    if COUNT > 2:
        tl.store(r2 + at, d2.to(r2.dtype.element_ty), mask=live)
    if COUNT > 1:
        tl.store(r1 + at, d1.to(r1.dtype.element_ty), mask=live)
    tl.store(r0 + at, d0.to(r0.dtype.element_ty), mask=live)


def weighted_sum(terms: list[Tensor], weights: list[float], base: Tensor | None, gate: Tensor | None) -> Tensor:
    """Launch `weighted_sum`."""
    out = torch.empty_like(terms[0])
    spare = MOST - len(terms)
    here = [aligned(out, term) for term in terms]
    extra = [here[0] if each is None else aligned(out, each) for each in (base, gate)]
    form = tuned("weighted_sum", (out.dtype, len(terms), out.numel()), DEFAULT, out.device)
    sum_kernel[programs(out.numel(), form["BLOCK"])](
        out,
        *here,
        *here[:1] * spare,
        *extra,
        out.numel(),
        *weights,
        *[0.0] * spare,
        COUNT=len(terms),
        BASE=base is not None,
        GATE=gate is not None,
        **form,
    )
    return out


def finite_differences(feature: Tensor, old: list[Tensor], room: list[Tensor], distances: list[float]) -> None:
    """Launch `finite_differences`."""
    fresh, *before = (aligned(room[0], tensor) for tensor in (feature, *old))
    spare = MOST - 1 - len(room)
    shares = [1 / distance for distance in distances]
    key = feature.dtype, len(room), feature.numel()
    form = tuned("finite_differences", key, DEFAULT, feature.device)
    differences_kernel[programs(feature.numel(), form["BLOCK"])](
        fresh,
        *before,
        *before[:1] * spare,
        *room,
        *room[:1] * spare,
        feature.numel(),
        *shares,
        *[0.0] * spare,
        COUNT=len(room),
        **form,
    )

"""Triton kernels of distances: partial sums of parts of memory, and their sum in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

DEFAULT = {"BLOCK": 2048, "num_warps": 4}
CANDIDATES = {"l1_sums": combinations(BLOCK=(1024, 2048, 4096, 8192), num_warps=(4, 8))}
WARPS = 4  # of the sum of the parts
MOST = 1024  # parts


@triton.jit
def parts_kernel(out, values, reference, size, blocks, parts, BLOCK: tl.constexpr):
    """Write the two sums of one part: `blocks` blocks that follow one another."""
    part = tl.program_id(0)
    change = tl.zeros([BLOCK], tl.float32)
    scale = tl.zeros([BLOCK], tl.float32)
    at = part.to(tl.int64) * blocks * BLOCK + tl.arange(0, BLOCK)
    for _ in range(blocks):
        live = at < size
        one = tl.load(values + at, mask=live, other=0).to(tl.float32)
        other = tl.load(reference + at, mask=live, other=0).to(tl.float32)
        change += tl.abs(one - other)
        scale += tl.abs(other)
        at += BLOCK
    tl.store(out + part, tl.sum(change, axis=0))
    tl.store(out + parts + part, tl.sum(scale, axis=0))


@triton.jit
def total_kernel(out, sums, parts, MOST: tl.constexpr):
    """Add up the parts of one of the two sums."""
    which = tl.program_id(0)
    at = tl.arange(0, MOST)
    total = tl.sum(tl.load(sums + which * parts + at, mask=at < parts, other=0.0), axis=0)
    tl.store(out + which, total)


def l1_sums(values: Tensor, reference: Tensor) -> Tensor:
    """Launch `l1_sums`."""
    values, reference = values.contiguous(), reference.contiguous()
    form = tuned("l1_sums", (values.dtype, values.numel()), DEFAULT, values.device)
    count = triton.cdiv(values.numel(), form["BLOCK"])
    blocks = triton.cdiv(count, MOST)
    parts = triton.cdiv(count, blocks)
    sums = values.new_empty(2, parts, dtype=torch.float32)
    out = values.new_empty(2, dtype=torch.float32)
    parts_kernel[(parts,)](sums, values, reference, values.numel(), blocks, parts, **form)
    total_kernel[(2,)](out, sums, parts, MOST=MOST, num_warps=WARPS)
    return out

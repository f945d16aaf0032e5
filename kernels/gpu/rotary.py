"""Triton kernel of rotations: one pass over memory, cosines and sines included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffcache.kernels.configs import combinations, tuned

# Pairs of a program and head: 16 slots of heads with 128 channels.
DEFAULT = {"TILE": 1024, "num_warps": 4}
CANDIDATES = {"rotate": combinations(TILE=(512, 1024, 2048), num_warps=(4, 8))}
ENOUGH = 1056  # programs that keep a large GPU busy, 8 for each multiprocessor


@triton.jit
def cos_sin(angle):
    """Return cosines and sines in float32.

    Angles are brought to an eighth of a turn around 0 in float64, as one of 1e6 radians has only
    0.06 radians of a float32 to spare. What remains is a polynomial, off by 8e-8 at most.
    """
    wide = angle.to(tl.float64)
    # A sum with 1.5 * 2 ** 52 has no room for a fraction: the nearest number of quarter turns.
    quarters = (wide * 0.6366197723675814 + 6755399441055744.0) - 6755399441055744.0
    rest = (wide - quarters * 1.5707963267948966).to(tl.float32)
    square = rest * rest
    odd_part = -0.1666665494 + square * (0.008332177915 - square * 0.0001951726674)
    even_part = 0.04166664686 - square * (0.001388736721 - square * 2.443841536e-05)
    sin = rest + rest * square * odd_part
    cos = 1.0 - 0.5 * square + square * square * even_part
    turn = quarters.to(tl.int64) & 3
    odd = (turn & 1) == 1
    found_cos, found_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    found_cos = tl.where((turn == 1) | (turn == 2), -found_cos, found_cos)
    return found_cos, tl.where(turn >= 2, -found_sin, found_sin)


@triton.jit
def rotate_kernel(
    out, x, angles, heads, each, slots, channels, start, pairs,
    x_batch, x_head, x_slot, a_batch, a_head, a_slot, by_cos, by_sin,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate some slots of `each` heads, whose angles are the same if they are several."""
    batch, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * each
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    live = (slot < slots) & (pair < pairs)
    angle = tl.load(
        angles + batch * a_batch + first.to(tl.int64) * a_head + slot * a_slot + pair, mask=live, other=0.0
    )
    cos, sin = cos_sin(angle)
    cos, sin = cos * by_cos, sin * by_sin
    source = x + batch * x_batch + slot * x_slot + start
    target = out + (batch * heads * slots + slot) * channels + start
    for head in range(first, tl.minimum(first + each, heads)):
        here = source + tl.cast(head, tl.int64) * x_head
        there = target + tl.cast(head, tl.int64) * slots * channels
        if INTERLEAVED:
            both = tl.arange(0, 2 * PAIRS)[None, :]
            whole = (slot < slots) & (both < 2 * pairs)
            value = tl.load(here + both, mask=whole).to(tl.float32)
            a, b = tl.split(tl.reshape(value, [ROWS, PAIRS, 2]))
            turned = tl.join(a * cos - b * sin, b * cos + a * sin)
            turned = tl.reshape(turned, [ROWS, 2 * PAIRS]).to(out.dtype.element_ty)
            tl.store(there + both, turned, mask=whole)
        else:
            a = tl.load(here + pair, mask=live).to(tl.float32)
            b = tl.load(here + pairs + pair, mask=live).to(tl.float32)
            tl.store(there + pair, (a * cos - b * sin).to(out.dtype.element_ty), mask=live)
            tl.store(there + pairs + pair, (b * cos + a * sin).to(out.dtype.element_ty), mask=live)
        if REST > 0:  # channels outside
            other = tl.arange(0, REST)[None, :]
            other = tl.where(other < start, other, other + 2 * pairs) - start
            kept = (slot < slots) & (other < channels - start)
            tl.store(there + other, tl.load(here + other, mask=kept), mask=kept)


def rotate(x: Tensor, angles: Tensor, scale: float, back: bool, start: int, interleaved: bool) -> Tensor:
    """Launch `rotate`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, heads, slots, channels = x.shape
    pairs = angles.shape[-1]
    wide = angles if angles.stride(-1) == 1 else angles.contiguous()
    wide = wide.expand(batch, heads, slots, pairs)
    width = triton.next_power_of_2(pairs)
    key = x.dtype, angles.dtype, "pairs" if interleaved else "halves", pairs, x.numel()
    form = tuned("rotate", key, DEFAULT, x.device)
    rows = max(form["TILE"] // width, 1)
    blocks = triton.cdiv(slots, rows)
    each = 1  # heads that share their angles go to one program, if enough programs are left
    if wide.stride(1) == 0 or heads == 1:
        each = min(max(blocks * batch * heads // ENOUGH, 1), heads)
    by_cos, by_sin = (1 / scale, -1 / scale) if back else (scale, scale)
    rest = channels - 2 * pairs
    rotate_kernel[(blocks, triton.cdiv(heads, each), batch)](
        out, x, wide, heads, each, slots, channels, start, pairs,
        *x.stride()[:3], *wide.stride()[:3], by_cos, by_sin,
        ROWS=rows, PAIRS=width, REST=triton.next_power_of_2(rest) if rest else 0,
        INTERLEAVED=interleaved, num_warps=form["num_warps"],
    )  # fmt: skip
    return out

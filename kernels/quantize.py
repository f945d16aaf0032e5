"""Code numbers in few bits on uniform grids, take them back, and attend to them as they are.

Codes lie as `diffcache.kernels.pack` packs them: a byte holds those of adjacent channels, the
first in its lowest bits. A grid is a scale and, unless it is symmetric about 0, the value of code
0, of a group of numbers. Groups run along tokens (`each` consecutive slots of one channel, as KIVI
codes keys) or along channels (`width` consecutive channels of one slot, as it codes values).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffcache.kernels.dispatch import DTYPES, define, no_products, nothing
from diffcache.kernels.pack import chunk_of, pack, unpack

BITS = (2, 4, 8)
MOST_SLOTS, MOST_CHANNELS = 256, 2048  # of a group that the kernels take


def can_quantize(x: Tensor, bits: float, each: int, width: int) -> bool:
    """Return whether the kernel should run on these arguments of `quant_groups`."""
    fits = bits in BITS and each <= MOST_SLOTS and width <= MOST_CHANNELS
    fits = fits and not x.shape[2] % each
    return fits and _whole_bytes(bits, width, x.shape[-1]) and QUANT.takes(x)


def can_restore(codes: Tensor, grid: Tensor, bits: float, width: int, size: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel of `dequant_groups` should run on arguments of it, to D = `size` and a dtype."""
    fits = bits in BITS and dtype in DTYPES and bool(codes.numel())
    return fits and _whole_bytes(bits, width, size) and DEQUANT.takes(grid, codes)


def _whole_bytes(bits: float, width: int, size: int) -> bool:
    """Return whether no byte holds channels of two groups of channels."""
    return width == 1 or width >= size or not width % int(8 // bits)


def quant_groups(
    x: Tensor, bits: int, each: int, width: int, intervals: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Code a tensor in groups, on a grid between the smallest and the largest number of each.

    Args:
        x: [B, H, S, D], a float dtype.
        bits: Bits of a code: 2, 4 or 8.
        each: Consecutive slots of a group, which divide S; 1 where groups run along channels.
        width: Consecutive channels of a group; 1 where groups run along tokens.
        intervals: Widths of a code between the two ends of a group.
        symmetric: Center the grid on 0 and store no value of code 0.
        dtype: Dtype in which the grid is stored. Groups beyond its range saturate.

    Returns:
        Codes, uint8 [B, H, S, bytes], and the grid, [B, H, S / each, 1 or 2, W], where W is D for
        groups along tokens and the number of groups of a slot otherwise.

    Raises:
        ValueError: If groups run both ways, or are of no such bits.
    """
    if bits not in BITS or min(each, width) != 1:
        raise ValueError(
            f"bits={bits}, each={each}, width={width}: must be one of {', '.join(map(str, BITS))} "
            "bits, and `each` or `width` must be 1"
        )
    run = QUANT if can_quantize(x, bits, each, width) else quant_twin
    found: tuple[Tensor, Tensor] = run(x, bits, each, width, float(intervals), symmetric, dtype)
    return found


def quant_twin(
    x: Tensor,
    bits: float,
    each: int,
    width: int,
    intervals: float,
    symmetric: bool,
    dtype: torch.dtype,
    relax: float = 0.0,
    whole_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `quant_groups` in plain PyTorch, in any bits that can be packed.

    `relax` and `whole_zero` move the grid, as `diffcache.kv.codec.quant.GroupQuant` says.
    """
    size = x.shape[3]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if width == 1:
        wide, axis = wide.reshape(*x.shape[:2], x.shape[2] // each, each, size), 3
    else:
        if short := -size % width:  # the last channel once more changes no group's range
            wide = torch.cat([wide, wide[..., -1:].expand(*x.shape[:3], short)], -1)
        wide, axis = wide.unflatten(3, (-1, width)), 4
    high, low = wide.amax(axis), wide.amin(axis)
    if symmetric:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    span = high - low
    scale = (span * (1 - 2 * relax) if relax else span) / intervals
    low = low + span * relax if relax else low
    if whole_zero:
        low = ((low / scale).round() * scale).where(scale > 0, low)
    limit = torch.finfo(dtype).max
    grid = torch.stack([scale] if symmetric else [scale, low], 3).clamp_(-limit, limit).to(dtype)
    scale, low = (part.unsqueeze(axis) for part in _parts(grid, -intervals / 2, wide.dtype))
    # A scale of 0 gives code 0, which stands for the group's one value; 0 / 0 would be NaN.
    step = scale.masked_fill(scale <= 0, math.inf)
    codes = (wide - low).div_(step).round_().clamp_(0, min(intervals, chunk_of(bits)[2] - 1)).to(torch.uint8)
    # Contiguous, as compilers are told, whatever the layout of `x`.
    return pack(codes.flatten(axis - 1, axis)[..., :size], bits).contiguous(), grid


def _parts(grid: Tensor, shift: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales and the values of code 0."""
    scale, *low = grid.to(dtype).unbind(3)
    return scale, low[0] if low else scale * shift


def dequant_groups(
    codes: Tensor,
    grid: Tensor,
    out: Tensor,
    bits: int,
    each: int,
    width: int,
    shift: float = 0.0,
    of: Tensor | None = None,
) -> None:
    """Write the numbers that codes stand for, `code * scale + low`, computed in float32.

    Args:
        codes: uint8 [B, H, S, bytes].
        grid: [B, H, T, 1 or 2, W]: scale and, unless the grid is symmetric, value of code 0.
        out: [B, H, S, D], a float dtype; channels lie side by side.
        bits: Bits of a code: 2, 4 or 8.
        each: Consecutive slots that share a row of the grid.
        width: Consecutive channels that share a column of it; 1 where W is D.
        shift: Value of code 0 of a symmetric grid, in scales.
        of: Row of the grid of each slot, an integer dtype [B, H, S], in the place of `each`.
    """
    fits = out.stride(-1) == 1 and can_restore(codes, grid, bits, width, out.shape[-1], out.dtype)
    run = DEQUANT if fits else dequant_twin
    run(codes, grid, out, bits, each, width, float(shift), of)


def dequant_twin(
    codes: Tensor, grid: Tensor, out: Tensor, bits: int, each: int, width: int, shift: float, of: Tensor | None
) -> None:
    """Do the writes of `dequant_groups` in plain PyTorch."""
    out.copy_(_restored(codes, grid, out, bits, each, width, shift, of))


def _restored(
    codes: Tensor, grid: Tensor, like: Tensor, bits: int, each: int, width: int, shift: float, of: Tensor | None = None
) -> Tensor:
    dtype, size = torch.promote_types(like.dtype, torch.float32), like.shape[-1]
    rows = torch.arange(codes.shape[2], device=codes.device).div(each, rounding_mode="floor")
    rows = rows.expand(*codes.shape[:3]) if of is None else of.long()
    columns = torch.arange(size, device=codes.device).div(width, rounding_mode="floor")
    scale, low = (
        part.gather(2, rows[..., None].expand(-1, -1, -1, part.shape[3]))[..., columns]
        for part in _parts(grid, shift, dtype)
    )
    if codes.dtype is torch.uint8:  # others are numbers of 8 bits
        codes = unpack(codes, bits, size)
    return codes.to(dtype) * scale + low


def _like_codes(
    x: Tensor, bits: int, each: int, width: int, intervals: float, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    batch, heads, slots, size = x.shape
    codes = x.new_empty(batch, heads, slots, -(-size * bits // 8), dtype=torch.uint8)
    wide = size if width == 1 else -(-size // width)
    return codes, x.new_empty(batch, heads, slots // each, 2 - symmetric, wide, dtype=dtype)


QUANT = define(
    "quant_groups(Tensor x, int bits, int each, int width, float intervals, bool symmetric, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    quant_twin,
    _like_codes,
    "quantize:quant_groups",
    no_products,
)
DEQUANT = define(
    "dequant_groups(Tensor codes, Tensor grid, Tensor(a!) out, int bits, int each, int width, "
    "float shift, Tensor? of) -> ()",
    dequant_twin,
    nothing,
    "quantize:dequant_groups",
    no_products,
)

"""Calls of the operators of diffcache.kernels.quantize."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffcache.kernels import quantize
from tests.kernels.cases import Case, guarded

# bits, symmetric, slots, channels, slots of a group, channels of a group
SHAPES = (
    (2, False, 64, 32, 32, 1),
    (4, True, 12, 70, 6, 1),
    (8, False, 12, 70, 12, 1),
    (4, False, 5, 6, 1, 1),
    (2, False, 9, 64, 1, 32),
    (2, True, 3, 40, 1, 16),
    (4, False, 7, 5, 1, 5),
    (8, True, 4, 24, 1, 16),
)


def written(x: np.ndarray, bits: int, intervals: float, symmetric: bool) -> tuple[Any, Any, Any]:
    """Return codes, scale and low of one group, in float32, with a grid in float16."""
    x = x.astype(np.float32)
    high, low = x.max(), x.min()
    if symmetric:
        high = max(abs(high), abs(low))
        low = -high
    scale = np.float32(np.float16(np.clip((high - low) / np.float32(intervals), 0, 65504)))
    low = np.float32(np.float16(np.clip(low, -65504, 65504)))
    if symmetric:
        low = scale * np.float32(-intervals / 2)
    codes = np.rint((x - low) / scale) if scale > 0 else np.zeros_like(x)
    return np.clip(codes, 0, min(intervals, 2**bits - 1)).astype(np.int64), scale, low


def numbers(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return the bytes [..., room] as codes [..., room * 8 / bits]."""
    per = 8 // bits
    found = np.stack([codes.astype(np.int64) >> bits * n & 2**bits - 1 for n in range(per)], -1)
    return found.reshape(*codes.shape[:-1], -1)


def groups(slots: int, size: int, each: int, width: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield row and column of the grid, and the slots and channels of each group."""
    for row, column in product(range(slots // each), range(-(-size // width))):
        first = row * each, column * width
        yield row, column, slice(first[0], first[0] + each), slice(first[1], first[1] + width)


def both(args: Any, out: Any) -> list[Tensor]:
    return list(out)


def coded(dtype: torch.dtype) -> Iterator[Case]:
    """Yield tensors to code: along tokens and channels, constant groups and outliers among them."""

    def exact(x: Tensor, bits: int, each: int, width: int, intervals: float, symmetric: bool, to: Any) -> list[Tensor]:
        batch, heads, slots, size = x.shape
        codes = np.zeros((batch, heads, slots, -(-size * bits // 8)), np.int64)
        columns = -(-size // width)
        grid = np.zeros((batch, heads, slots // each, 2 - symmetric, columns))
        for b, h in product(range(batch), range(heads)):
            for row, column, where, which in groups(slots, size, each, width):
                found, *parts = written(x[b, h, where, which].numpy(), bits, intervals, symmetric)
                grid[b, h, row, :, column] = parts[: 2 - symmetric]
                for place in range(found.shape[1]):
                    channel = which.start + place
                    shift = channel % (8 // bits) * bits
                    codes[b, h, where, channel * bits // 8] |= found[:, place] << shift
        return [torch.from_numpy(codes), torch.from_numpy(grid)]

    for bits, symmetric, slots, size, each, width in SHAPES:
        x = guarded((2, 2, slots, size), dtype, bits)
        x[0, 1, :each] = 0.5  # one value
        x[1, 0, 0, 0] = 30000.0
        intervals = 2**bits - (2 if symmetric else 1)
        name = f"quant{bits}-{symmetric}-{slots}-{size}-{each}-{width}"
        yield Case(
            name, quantize.QUANT, (x, bits, each, width, float(intervals), symmetric, torch.float16), exact, both
        )
    x = guarded((2, 64, 2, 32), dtype, 3).transpose(1, 2)
    yield Case("quant-strides", quantize.QUANT, (x, 4, 32, 1, 15.0, False, torch.float16), exact, both)
    yield Case("quant-levels", quantize.QUANT, (x, 4, 1, 32, 8.0, False, torch.float16), exact, both)


def decoded(dtype: torch.dtype) -> Iterator[Case]:
    """Yield codes to take back, with rows of the grid in order and listed."""

    def exact(
        codes: Tensor, grid: Tensor, out: Tensor, bits: int, each: int, width: int, shift: float, of: Tensor | None
    ) -> list[Tensor]:
        found = np.zeros(out.shape)
        known, parts = numbers(codes.numpy(), bits), grid.numpy()
        for b, h, s, c in np.ndindex(*out.shape):
            row = s // each if of is None else int(of[b, h, s])
            scale, *low = parts[b, h, row, :, c // width]
            found[b, h, s, c] = known[b, h, s, c] * scale + (low[0] if low else scale * shift)
        return [torch.from_numpy(found)]

    for bits, symmetric, slots, size, each, width in SHAPES:
        random = torch.Generator().manual_seed(bits)
        shape = (2, 2, slots, -(-size * bits // 8))
        codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        grid = guarded((2, 2, slots // each, 2 - symmetric, -(-size // width)), torch.float16, 4)
        out = torch.full((2, 2, slots, size), float("nan"), dtype=dtype)
        name = f"dequant{bits}-{symmetric}-{slots}-{size}-{each}-{width}"
        shift = -(2**bits - 2) / 2
        args = codes, grid, out, bits, each, width, shift
        yield Case(name, quantize.DEQUANT, (*args, None), exact, lambda args, out: [args[2]], 1.2)
        if size == 70:
            of = torch.randint(0, slots // each, (2, 2, slots), generator=random, dtype=torch.uint8)
            room = torch.full((2, slots, 2, size), float("nan"), dtype=dtype).transpose(1, 2)
            args = (*args[:2], room, *args[3:], of)
            yield Case(f"{name}-listed", quantize.DEQUANT, args, exact, lambda args, out: [args[2]], 1.2)


FAMILIES = (coded, decoded)

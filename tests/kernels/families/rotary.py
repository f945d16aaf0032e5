"""Calls of the operator of diffcache.kernels.rotary."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffcache.kernels import rotary
from tests.kernels.cases import Case, guarded

# Name, x, angles, dtype of angles, scale, back, start, interleaved.
CALLS = (
    ("heads-share", (2, 3, 5, 8), (5, 4), torch.float32, 1.0, False, 0, False),
    ("one-angle", (1, 2, 3, 4), (1, 2), torch.float32, 1.0, False, 0, True),
    ("back", (1, 2, 7, 128), (1, 1, 7, 64), torch.float32, 1.3, True, 0, True),
    ("rows", (2, 3, 17, 64), (2, 1, 17, 32), torch.float32, 0.7, False, 0, False),
    ("each-head", (2, 3, 17, 12), (2, 3, 17, 6), torch.float64, 1.0, False, 0, True),
    ("heads", (2, 3, 4, 12), (1, 3, 4, 6), torch.float64, 2.5, True, 0, False),
    ("middle", (1, 2, 33, 21), (33, 5), torch.float32, 1.1, False, 3, False),
    ("start", (1, 2, 33, 50), (2, 33, 22), torch.float64, 1.0, True, 6, True),
    ("end", (3, 1, 2, 96), (3, 1, 2, 16), torch.float32, 1.0, False, 0, True),
    ("many-slots", (1, 3, 600, 4), (600, 2), torch.float32, 1.0, False, 0, False),
)


def exact(x: Tensor, angles: Tensor, scale: float, back: bool, start: int, interleaved: bool) -> list[Tensor]:
    """Multiply every pair by the matrix of its rotation."""
    pairs = angles.shape[-1]
    sign, size = (-1, 1 / scale) if back else (1, scale)
    cos, sin = angles.cos(), sign * angles.sin()
    matrix = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2) * size
    matrix = matrix.expand(*x.shape[:3], pairs, 2, 2)
    first = start + torch.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    found = x.clone()
    turned = matrix @ torch.stack([x[..., first], x[..., second]], -1)[..., None]
    found[..., first], found[..., second] = turned[..., 0, 0], turned[..., 1, 0]
    return [found]


def rotations(dtype: torch.dtype) -> Iterator[Case]:
    """Yield rotations by angles of all shapes, of channels anywhere, also far from 0."""
    for name, shape, angular, precise, *rest in CALLS:
        angles = guarded(angular, precise, 1) * 3e5
        x = guarded(shape, dtype, 2)
        yield Case(f"rotate-{name}", rotary.ROTATE, (x, angles, *rest), exact, tolerance=1.1)
    x = guarded((2, 5, 3, 16), dtype, 3).transpose(1, 2)  # as projections leave heads
    angles = guarded((5, 8), torch.float32, 4)
    yield Case("rotate-strides", rotary.ROTATE, (x, angles, 1.0, False, 0, False), exact)
    wide = guarded((2, 1, 16, 5), dtype, 5).transpose(2, 3).expand(-1, 4, -1, -1)
    args = wide, guarded((8, 5), torch.float32, 6).t(), 1.0, False, 0, True
    yield Case("rotate-columns", rotary.ROTATE, args, exact)


FAMILIES = (rotations,)

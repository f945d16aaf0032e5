"""Calls of the operator of diffcache.kernels.int8."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffcache.kernels import int8
from tests.kernels.cases import Case, guarded

# Rows, query heads, key heads, queries, keys, channels, channels of values; size of a common offset.
SHAPES = (
    (1, 2, 1, 130, 133, 64, 64, 0.0),
    (2, 2, 2, 3, 64, 64, 48, 20.0),
    (1, 2, 1, 1, 1, 16, 16, 0.0),
    (1, 2, 2, 260, 40, 24, 24, 3.0),
    (1, 1, 1, 128, 200, 128, 128, 8.0),
)


def exact_int8(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
    """Return attention over codes that each block is counted in, block by block."""
    groups = q.shape[1] // k.shape[1]
    k = (k - k.mean(2, keepdim=True)).repeat_interleave(groups, 1)
    parts = []
    for x, block in ((q * scale, int8.ROWS), (k, int8.KEYS)):
        found = torch.zeros_like(x)
        for row, head, first in torch.cartesian_prod(
            torch.arange(len(x)), torch.arange(x.shape[1]), torch.arange(0, x.shape[2], block)
        ).tolist():
            part = x[row, head, first : first + block]
            step = part.abs().max() / 127
            found[row, head, first : first + block] = (part / step).round() * step if step else part
        parts.append(found)
    weights = (parts[0] @ parts[1].mT).softmax(-1)
    return [weights @ v.repeat_interleave(groups, 1)]


def attentions(dtype: torch.dtype) -> Iterator[Case]:
    """Yield attention; weights and values are multiplied in float16, whatever the dtype."""
    rounded = torch.float16 if dtype == torch.float32 else dtype
    for number, (rows, asking, heads, count, width, size, last, offset) in enumerate(SHAPES):
        shapes = (asking, count, size), (heads, width, size), (heads, width, last)
        q, k, v = (guarded((rows, *shape), dtype, seed) for seed, shape in enumerate(shapes))
        k += (offset * torch.randn(size, generator=torch.Generator().manual_seed(1))).to(dtype)
        if number % 2:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
            v *= 1e3 if dtype == torch.float16 else 1e6
        name = f"int8-{rows}-{asking}-{heads}-{count}-{width}-{size}-{last}"
        given = q, k, v, size**-0.5
        yield Case(name, int8.INT8, given, exact_int8, lambda _, out, to=rounded: [out.to(to)], 3)


FAMILIES = (attentions,)

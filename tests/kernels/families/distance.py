"""Calls of the operators of diffcache.kernels.distance."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffcache.kernels import distance
from tests.kernels.cases import DTYPES, Case, guarded

TOLERANCE = 14  # plain PyTorch on a CPU adds number by number


def exact(values: Tensor, reference: Tensor) -> list[Tensor]:
    """Return both sums."""
    return [torch.stack(((values - reference).abs().sum(), reference.abs().sum()))]


def sums(dtype: torch.dtype) -> Iterator[Case]:
    """Yield sums over one number, over parts of a block, and over more than one block a part."""
    for shape in ((1,), (15,), (3, 1365), (2, 3, 4, 5), (4097,), (5, 7, 64)):
        pair = guarded(shape, dtype, 1), guarded(shape, dtype, 2)
        yield Case(f"l1-{shape}", distance.SUMS, pair, exact, tolerance=TOLERANCE)
    turned = guarded((6, 40), dtype, 2).t()
    yield Case("l1-strides", distance.SUMS, (guarded((40, 6), dtype, 1), turned), exact, tolerance=TOLERANCE)
    wide = guarded((1, 40), dtype, 3).expand(3, 40)  # not dense
    yield Case("l1-expanded", distance.SUMS, (wide, guarded((3, 40), dtype, 4)), exact, tolerance=TOLERANCE)
    mixed = guarded((99,), dtype, 5), guarded((99,), DTYPES[0], 6)
    yield Case("l1-dtypes", distance.SUMS, mixed, exact, tolerance=TOLERANCE)


FAMILIES = (sums,)

"""Calls of the operator of diffcache.kernels.merge."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import merge
from tests.kernels.cases import Case, guarded

SHAPES = ((1, 1), (5, 3), (2, 3, 7, 64), (33, 128), (2, 9, 96), (3, 256))


def apart(out: Tensor, lse: Tensor) -> list[Tensor]:
    """Return results without infinities, which have no norm: where they are is a result more."""
    return [out, lse.where(lse.isfinite(), 0), lse == -math.inf]


def exact(outs: list[Tensor], lses: list[Tensor]) -> list[Tensor]:
    """Return the sum of the parts by the sums of their exponentials."""
    mass = torch.stack(lses).exp()
    total = mass.sum(0)
    weighted = sum(out * one[..., None] for out, one in zip(outs, mass, strict=True))
    return apart(weighted / total.where(total > 0, 1)[..., None], total.log())


def merges(dtype: torch.dtype) -> Iterator[Case]:
    """Yield merges of two to eight parts, of which some see nothing."""

    def found(args: Any, out: Any) -> list[Tensor]:
        return apart(*out)

    for count, shape in [*((n, (17, 64)) for n in (3, 5, 8)), *((2, each) for each in SHAPES)]:
        outs = [guarded(shape, dtype, seed) for seed in range(count)]
        lses = [3 * guarded(shape[:-1], torch.float32, 20 + seed) for seed in range(count)]
        lses[0][..., ::3] = -math.inf  # one part
        for lse in lses:
            lse[..., 4::5] = -math.inf  # all of them
        for part, lse in zip(outs, lses, strict=True):
            part[lse == -math.inf] = 0
        yield Case(f"merge{count}-{shape}", merge.MERGE, (outs, lses), exact, found, 3)
    wide = guarded((6, 2, 32), dtype, 1).transpose(0, 1), guarded((2, 6, 32), dtype, 2)
    logs = [guarded((6, 2), torch.float32, 3).t(), guarded((2, 6), torch.float32, 4) + 90]
    yield Case("merge-strides", merge.MERGE, (list(wide), logs), exact, found, 3)


FAMILIES = (merges,)

"""Calls of the operators of diffcache.kernels.linear."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffcache.kernels import linear
from tests.kernels.cases import Case, guarded

SHAPES = ((1, 1, 1), (3, 40, 24), (17, 33, 5), (130, 64, 150), (65, 300, 16), (2, 1100, 3))


def products(dtype: torch.dtype) -> Iterator[Case]:
    """Yield products of random codes, and the largest there are."""

    def exact(rows: Tensor, codes: Tensor, terms: Tensor, zero: int, factor: Tensor, shift: Tensor, _) -> list[Tensor]:
        weight = codes.double() - terms[1].double()[:, None]
        return [torch.einsum("mk,nk->mn", rows.double() - zero, weight) * factor + shift]

    for seed, (height, depth, width) in enumerate(SHAPES):
        random = torch.Generator().manual_seed(seed)
        rows, codes = (
            torch.randint(-128, 128, (n, depth), generator=random, dtype=torch.int8) for n in (height, width)
        )
        rows[0] = codes[0] = -128
        zeros = torch.randint(-128, 128, (width,), generator=random, dtype=torch.int32)
        terms = torch.stack((codes.sum(1, dtype=torch.int32), zeros))
        factor = guarded((width,), torch.float32, seed).mul_(1e-4)
        shift = guarded((width,), torch.float32, seed + 9)
        args = rows, codes, terms, 7 - 20 * seed, factor, shift, dtype
        yield Case(f"linear-{(height, depth, width)}", linear.LINEAR, args, exact)


FAMILIES = (products,)

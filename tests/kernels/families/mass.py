"""Calls of the operators of diffcache.kernels.mass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import mass
from tests.kernels.cases import Case, guarded
from tests.kernels.families.merge import apart

# Rows, query heads, key heads, queries, keys, channels, offset.
SHAPES = (
    (1, 2, 2, 1, 1, 64, None), (2, 4, 1, 1, 160, 64, None), (1, 4, 2, 65, 133, 64, 68),
    (2, 2, 2, 64, 64, 32, 0), (1, 6, 2, 16, 31, 16, 15), (1, 2, 1, 100, 200, 128, None),
    (1, 3, 1, 63, 40, 24, -20), (1, 1, 1, 7, 600, 16, 590),
)  # fmt: skip


def shares(q: Tensor, k: Tensor, scale: float, offset: int | None) -> Tensor:
    """Return the logits by their definition, [B, Hq, n, N]."""
    own = k.expand(len(q), -1, -1, -1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = scale * (q[:, :, :, None] * own[:, :, None]).sum(-1)
    if offset is not None:
        seen = torch.ones(logits.shape[2:], dtype=torch.bool).tril(offset)
        logits[..., ~seen] = -math.inf
    return logits


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, float, int | None]]:
    """Yield queries, keys, scales and offsets."""
    for rows, asking, heads, count, width, size, offset in SHAPES:
        q = guarded((rows, asking, count, size), dtype, 1)
        k = guarded((rows, heads, width, size), dtype, 2)
        name = f"{rows}-{asking}-{heads}-{count}-{width}-{size}-{offset}"
        yield name, q, k, 1.5 * size**-0.5, offset
    q = guarded((2, 9, 4, 32), dtype, 3).transpose(1, 2)
    yield "strides", q, guarded((1, 70, 2, 32), dtype, 4).transpose(1, 2), 0.3, 61
    yield "columns", q, guarded((2, 2, 32, 40), dtype, 5).mT, 0.3, None


def logs(dtype: torch.dtype) -> Iterator[Case]:
    """Yield log-sum-exps."""

    def exact(*args: Any) -> list[Tensor]:
        found = shares(*args).exp().sum(-1).log()
        return apart(found, found)[1:]

    for name, *args in calls(dtype):
        yield Case(
            f"lse-{name}", mass.LSE, tuple(args), exact, lambda args, out: apart(out, out)[1:], 10
        )


def masses(dtype: torch.dtype) -> Iterator[Case]:
    """Yield masses, also of queries that do not count."""

    def exact(q: Tensor, k: Tensor, lse: Tensor, *more: Any) -> list[Tensor]:
        seeing = lse.where(lse > -math.inf, math.inf)
        part = (shares(q, k, *more) - seeing[..., None]).exp().sum(2)
        return [part.unflatten(1, (k.shape[1], -1)).sum(2)]

    for name, q, k, *more in calls(dtype):
        lse = shares(q.double(), k.double(), *more).logsumexp(-1).float()
        if lse.shape[2] > 1:
            lse[0, :, ::5] = math.inf
        yield Case(f"mass-{name}", mass.MASS, (q, k, lse, *more), exact, tolerance=40)


FAMILIES = (logs, masses)

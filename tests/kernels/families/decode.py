"""Calls of the operator of diffcache.kernels.decode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import decode
from tests.kernels.cases import Case, guarded
from tests.kernels.families.merge import apart

# Rows, query heads, key heads, queries, keys, channels, channels of values.
SHAPES = (
    (1, 2, 2, 1, 1, 64, 64), (2, 4, 1, 1, 31, 64, 64), (1, 4, 2, 3, 200, 64, 64),
    (1, 3, 1, 16, 133, 16, 16), (1, 8, 1, 5, 70, 32, 48), (1, 3, 1, 2, 300, 24, 24),
    (1, 2, 1, 1, 330, 128, 128),
)  # fmt: skip
# Place of the first of three queries among 200, and the window.
LIMITS = ((197, 0), (120, 0), (197, 48), (64, 20), (5, 300), (190, 1), (230, 70), (0, 0))


def exact(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slots: Any, offset: int | None, window: int
) -> list[Tensor]:
    """Return attention row by row and query by query, over the keys that it sees."""
    batch, asking, count, _ = q.shape
    k, v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    heads = k.shape[1]
    out = torch.zeros(batch, asking, count, v.shape[3]).double()
    lse = torch.full((batch, asking, count), -math.inf).double()
    for row in range(batch):
        for head in range(asking):
            own = head * heads // asking
            places = list(range(k.shape[2]))
            if slots is not None:
                places = slots.expand(batch, heads, -1)[row, own].tolist()
            for query in range(count):
                at = len(places) if offset is None else offset + query
                seen = [
                    slot
                    for place, slot in enumerate(places)
                    if place <= at
                    and (not window or place > at - window)
                    and 0 <= slot < k.shape[2]
                ]
                if not seen:
                    continue
                logits = scale * (k[row, own, seen] * q[row, head, query]).sum(-1)
                lse[row, head, query] = logits.exp().sum().log()
                out[row, head, query] = logits.softmax(0) @ v[row, own, seen]
    return apart(out, lse)


def decodes(dtype: torch.dtype) -> Iterator[Case]:
    """Yield calls with limits and lists of slots."""

    def case(name: str, *args: Any) -> Case:
        # The kernel rounds the weights of values to their dtype, as fused attention does.
        return Case(
            f"decode-{name}", decode.DECODE, args, exact, found, 20 if dtype == torch.float32 else 2
        )

    def found(args: Any, out: tuple[Tensor, Tensor]) -> list[Tensor]:
        return apart(out[0], out[1].to(dtype))  # one tolerance is of both

    def drawn(rows: int, heads: int, width: int, size: int, seed: int) -> Tensor:
        return guarded((rows, heads, width, size), dtype, seed)

    for rows, asking, heads, count, width, size, last in SHAPES:
        tensors = (drawn(rows, asking, count, size, 1), drawn(rows, heads, width, size, 2),
                   drawn(rows, heads, width, last, 3))  # fmt: skip
        name = f"{rows}-{asking}-{heads}-{count}-{width}-{size}-{last}"
        yield case(name, *tensors, 1.5 * size**-0.5, None, None, 0)
    q, k, v = (drawn(2, heads, n, 32, n) for heads, n in ((4, 3), (2, 200), (2, 200)))
    many = torch.stack([torch.randperm(200)[:160] for _ in range(4)]).view(2, 2, 160).int()
    many[:, 0, 40:77] = -1
    many[0, 1, 20:30] = 200
    many[1, 1] = -1
    for number, limits in enumerate(LIMITS):
        yield case(f"limits{number}", q, k, v, 0.2, None, *limits)
    for number, limits in enumerate(((None, 0), (120, 0), (150, 90))):
        yield case(f"slots{number}", q, k, v, 0.2, many, *limits)
    turned = guarded((2, 3, 4, 32), dtype, 7).transpose(1, 2)
    held = guarded((1, 200, 2, 32), dtype, 8).transpose(1, 2)
    yield case("strides", turned, held, v[:1], 0.2, many[:1, :1].long(), None, 0)
    yield case("columns", q, drawn(2, 2, 32, 200, 9).mT, v, 0.2, None, None, 0)


FAMILIES = (decodes,)

"""Calls of the operators of diffcache.kernels.move."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffcache.kernels import move
from tests.kernels.cases import Case, guarded

# Name, rows, heads, slots, channels of keys and of values, slots that are named.
SHAPES = (
    ("one", 1, 1, 1, 16, 16, 1),
    ("odd", 2, 3, 17, 7, 5, 9),
    ("wide", 1, 2, 40, 128, 64, 33),
    ("latent", 2, 1, 9, 96, 8, 9),
    ("none", 1, 2, 4, 8, 8, 0),
    ("many", 1, 2, 300, 16, 16, 290),
)


def places(rows: int, slots: int, count: int, *, each: bool = True) -> Tensor:
    """Return different slots for each row, int64 [rows, count], or [count] for all."""
    drawn = torch.Generator().manual_seed(rows + slots)
    found = [torch.randperm(slots, generator=drawn)[:count] for _ in range(rows)]
    return torch.stack(found) if each else found[0]


def scatters(dtype: torch.dtype) -> Iterator[Case]:
    """Yield writes to slots of all rows and of each, into buffers with room at the end."""

    def exact(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, index: Tensor) -> list[Tensor]:
        for row, at in enumerate(index.expand(len(k), -1).tolist()):
            for number, slot in enumerate(at):
                k[row, :, slot], v[row, :, slot] = new_k[row, :, number], new_v[row, :, number]
        return [k, v]

    def case(name: str, *args: Tensor) -> Case:
        return Case(f"scatter-{name}", move.SCATTER, args, exact, lambda args, out: list(args[:2]))

    for number, (name, rows, heads, slots, k_size, v_size, count) in enumerate(SHAPES):
        k, v = (guarded((rows, heads, slots, n), dtype, n) for n in (k_size, v_size))
        fresh = (guarded((rows, heads, count, n), dtype, 9 + n) for n in (k_size, v_size))
        yield case(name, k, v, *fresh, places(rows, slots, count, each=number % 2 == 1))
    k, v = (guarded((2, 3, 12, 8), dtype, seed)[:, :, :10] for seed in (1, 2))
    new_k = guarded((2, 4, 3, 8), dtype, 3).transpose(1, 2)  # as projections leave heads
    new_v = guarded((2, 1, 4, 1), dtype, 4).expand(-1, 3, -1, 8)
    same = places(2, 10, 4).sort().values
    yield case("strides", k, v, new_k, new_v, same)
    again = torch.tensor([[1, 5, 5, 5], [0, 2, 3, 9]])
    twice = new_v.clone()
    twice[0, :, 2:] = twice[0, :, 1:2]
    yield case("twice", v.clone(), v, twice, twice.clone(), again)


def gathers(dtype: torch.dtype) -> Iterator[Case]:
    """Yield slots in another order, the same for all heads and others for each."""

    def exact(k: Tensor, v: Tensor, index: Tensor) -> list[Tensor]:
        wide = index.expand(-1, k.shape[1], -1)
        heads = range(k.shape[1])
        return [
            torch.stack([torch.stack([x[b, h, at[h]] for h in heads]) for b, at in enumerate(wide)]) for x in (k, v)
        ]

    def case(name: str, *args: Tensor) -> Case:
        return Case(f"gather-{name}", move.GATHER, args, exact, lambda args, out: list(out))

    for number, (name, rows, heads, slots, k_size, v_size, count) in enumerate(SHAPES):
        apart = (1, heads)[number % 2]
        k, v = (guarded((rows, heads, slots, n), dtype, n) for n in (k_size, v_size))
        index = places(rows * apart, slots, count).view(rows, apart, count)
        yield case(name, k, v, index)
    wide = guarded((2, 5, 3, 8), dtype, 1).transpose(1, 2)
    part = guarded((2, 3, 9, 8), dtype, 2)[:, :, 2:7]
    yield case("strides", wide, part, places(2, 5, 4)[:, None].expand(-1, 3, -1))
    shared = guarded((1, 3, 5, 8), dtype, 3).expand(2, -1, -1, -1)
    columns = guarded((2, 3, 8, 5), dtype, 4).transpose(2, 3)
    yield case("shared", shared, columns, places(2, 5, 4)[:, None])


FAMILIES = (scatters, gathers)

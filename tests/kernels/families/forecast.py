"""Calls of the operators of diffcache.kernels.forecast."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import forecast
from tests.kernels.cases import Case, guarded

SIZES = ((1,), (15,), (1000,), (3, 1365), (2, 3, 4, 5))
EXTRAS = ((False, False), (True, False), (True, True))


def sums(dtype: torch.dtype) -> Iterator[Case]:
    """Yield weighted sums of one to five terms, with and without base and gate."""

    def exact(terms: list[Tensor], weights: list[float], base: Any, gate: Any) -> list[Tensor]:
        stacked = torch.stack(terms) * torch.tensor(weights).double().view(-1, *[1] * terms[0].dim())
        total = stacked.sum(0)
        total = total if gate is None else total * gate
        return [total if base is None else total + base]

    calls = [*enumerate(SIZES, 1), *((3, shape) for shape in SIZES[:-1]), *((5, (1000,)),) * 3]
    for number, (count, shape) in enumerate(calls):
        terms = [guarded(shape, dtype, seed) for seed in range(count)]
        base, gate = (guarded(shape, dtype, 8 + n) if e else None for n, e in enumerate(EXTRAS[number % 3]))
        weights = [1.0, 3.0, 4.5, 4.5, 3.375][:count]
        name = f"sum{count}-{shape}-{EXTRAS[number % 3]}"
        yield Case(name, forecast.SUM, (terms, weights, base, gate), exact)
    mixed = [guarded((4, 6), dtype, 1), guarded((6, 4), dtype, 2).t()]
    yield Case("sum-strides", forecast.SUM, (mixed, [0.5, -2.0], None, guarded((6,), dtype, 3)), exact)


def differences(dtype: torch.dtype) -> Iterator[Case]:
    """Yield differences of orders one to four, also over the old factors."""

    def exact(feature: Tensor, old: list[Tensor], room: Any, steps: list[float]) -> list[Tensor]:
        found = [feature]
        for factor, step in zip(old, steps, strict=True):
            found.append((found[-1] - factor) / step)
        return found[1:]

    for count, shape in zip((1, 2, 3, 4, 2), SIZES, strict=True):
        old = [guarded(shape, dtype, seed) for seed in range(count)]
        room = [guarded(shape, dtype, 9 + seed) for seed in range(count)]
        args = guarded(shape, dtype, 7), old, room, [4.0, -3.0, 2.0, 5.0][:count]
        yield Case(f"differences{count}-{shape}", forecast.DIFFERENCES, args, exact, lambda args, out: args[2])


FAMILIES = (sums, differences)

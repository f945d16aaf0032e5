"""Calls of the operators of diffcache.kernels.rows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import rows
from tests.kernels.cases import Case, guarded

SHAPES = ((1,), (15,), (3, 16), (2, 5, 50), (70, 64), (2, 3, 5, 96), (2, 1000), (2, 3072))


def packed(tensor: Tensor) -> list[Tensor]:
    """Return codes and scales: the scale is rounded first, and codes are multiples of it."""
    scale = (tensor.abs().amax(-1, keepdim=True) * 257 / 256 / 127).clamp(min=1e-30).bfloat16()
    return [torch.round(tensor / scale.double()).clamp(-127, 127), scale.double()]


def packs(dtype: torch.dtype) -> Iterator[Case]:
    """Yield rows of all widths; of zeros, of subnormals, and with one large number."""
    for shape in SHAPES:
        yield Case(f"pack-{shape}", rows.PACK, (guarded(shape, dtype, 1),), packed, lambda args, out: list(out))
    odd = guarded((4, 40), dtype, 2)
    odd[0], odd[1], odd[2, 7] = 0, torch.finfo(dtype).tiny / 4, 1e4
    odd[3] = torch.arange(40) * 0.5  # numbers in the middle of two codes, were the scale 1
    yield Case("pack-odd", rows.PACK, (odd,), packed, lambda args, out: list(out))
    turned = guarded((40, 6), dtype, 3).t()
    yield Case("pack-strides", rows.PACK, (turned,), packed, lambda args, out: list(out))


def coded(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Return random codes, and scales with NaN before and after them in memory."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    return codes, guarded((*shape[:-1], 1), torch.bfloat16, seed).abs_().mul_(0.02)


def sums(dtype: torch.dtype) -> Iterator[Case]:
    """Yield sums of one to five terms, with and without a base."""

    def exact(codes: list[Tensor], scales: list[Tensor], weights: list[float], base: Any, _: Any) -> list[Tensor]:
        triples = zip(codes, scales, weights, strict=True)
        total = sum(code.double() * scale * weight for code, scale, weight in triples)
        return [total if base is None else total + base]

    sizes = [*((count, (3, 100)) for count in (1, 1, 3, 5)), *((2, shape) for shape in SHAPES)]
    for number, (count, shape) in enumerate(sizes):
        codes, scales = map(list, zip(*(coded(shape, seed) for seed in range(count)), strict=True))
        weights = [1.0, -3.0, 4.5, 4.5, 3.375][:count]
        base = guarded(shape, dtype, 9) if number % 2 else None
        yield Case(f"int8sum{count}-{shape}-{number % 2}", rows.SUM, (codes, scales, weights, base, dtype), exact)
    code, scale = coded((6, 40), 1)
    mixed = [code, coded((40, 6), 2)[0].t()], [scale, scale], [0.5, -2.0]
    base = guarded((40, 6), dtype, 3).t()
    yield Case("int8sum-strides", rows.SUM, (*mixed, base, dtype), exact)


FAMILIES = (packs, sums)

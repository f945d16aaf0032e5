"""Features held as int8 codes, and forecasts from them, at the sizes of FLUX.1-dev and Wan2.1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diffcache.eval.kernels.case import SIZES, KernelCase, compiled, tensors
from diffcache.eval.kernels.forecast import weights
from diffcache.kernels import forecast, rows

TERMS = 3


def _launch_sum(codes: list[Tensor], scales: list[Tensor], base: Tensor) -> Tensor:
    found: Tensor = rows.SUM(codes, scales, weights(TERMS), base, base.dtype)
    return found


def _sum(codes: list[Tensor], scales: list[Tensor], base: Tensor) -> Tensor:
    return rows.weighted_sum_int8_twin(codes, scales, weights(TERMS), base, base.dtype)


def _unpack_first(codes: Sequence[Tensor], scales: Sequence[Tensor], base: Tensor) -> Tensor:
    """Unpack with one kernel for each term, and sum the terms with another."""
    pairs = zip(codes, scales, strict=True)
    terms = [rows.SUM([code], [scale], [1.0], None, base.dtype) for code, scale in pairs]
    found: Tensor = forecast.SUM(terms, weights(TERMS), base, None)
    return found


def _launch_pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = rows.PACK(tensor)
    return codes, scale


def cases() -> Iterator[KernelCase]:
    """Yield the rows of the benchmark."""
    for model, shape in SIZES.items():

        def held(
            device: torch.device, tiny: bool, shape: tuple[int, int] = shape
        ) -> tuple[list[Tensor], list[Tensor], Tensor]:
            size = (TERMS, *((8, 64) if tiny else shape))
            codes = torch.randint(-127, 128, size, device=device, dtype=torch.int8)
            scales = torch.rand(*size[:-1], 1, device=device).add(0.1).to(torch.bfloat16) / 127
            (base,) = tensors(1, shape)(device, tiny)
            return list(codes.unbind()), list(scales.unbind()), base

        count, tokens = math.prod(shape), shape[0]
        packs = {"kernel": _launch_pack, "plain": rows.pack_twin, "torch.compile": compiled(rows.pack_twin)}
        yield KernelCase(
            "pack_rows",
            model,
            f"{list(shape)} bfloat16",
            tensors(1, shape),
            packs,
            3 * count + 2 * tokens,
            target={"plain": 4.0},
        )
        sums = {"kernel": _launch_sum, "plain": _sum, "unpack first": _unpack_first, "torch.compile": compiled(_sum)}
        yield KernelCase(
            "weighted_sum_int8",
            model,
            f"{list(shape)} int8, order 2, and a bfloat16 base",
            held,
            sums,
            TERMS * (count + 2 * tokens) + 2 * 2 * count,
            target={"plain": 4.0, "unpack first": 1.5},
        )

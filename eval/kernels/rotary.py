"""Rotations of keys at the sizes of Llama-3-8B and Wan2.1-1.3B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kernels.case import KernelCase, compiled
from diffcache.kernels import rotary

# Keys [B, H, S, D], whether adjacent channels are a pair, dtype of angles.
SIZES = {
    "Llama-3-8B": ((1, 8, 32768, 128), False, torch.float32),
    "Llama-3-8B, one token": ((1, 32, 1, 128), False, torch.float32),
    "Wan2.1-1.3B": ((1, 12, 32760, 128), True, torch.float64),
}


def _inputs(
    shape: tuple[int, int, int, int], precise: torch.dtype
) -> Callable[[torch.device, bool], tuple[Tensor, Tensor]]:
    def make(device: torch.device, tiny: bool) -> tuple[Tensor, Tensor]:
        batch, heads, slots, size = (1, 2, 9, 16) if tiny else shape
        x = torch.randn(batch, heads, slots, size, device=device, dtype=torch.bfloat16)
        angles = 100 * torch.randn(slots, size // 2, device=device, dtype=precise)
        return x, angles

    return make


def _by_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate as language models of transformers do, with tables in the dtype of keys."""
    cos, sin = (torch.cat([table, table], -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def _by_complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate as the published code of Wan does, in complex numbers of 128 bits."""
    turns = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _plain(interleaved: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, angles: Tensor) -> Tensor:
        return rotary.rotate_twin(x, angles, 1.0, False, 0, interleaved)

    return run


def _kernel(interleaved: bool) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, angles: rotary.ROTATE(x, angles, 1.0, False, 0, interleaved)


def cases() -> Iterator[KernelCase]:
    """Yield the rows of the benchmark."""
    for model, (shape, interleaved, precise) in SIZES.items():
        ways: dict[str, Callable[..., Any]] = {
            "kernel": _kernel(interleaved),
            "plain": _plain(interleaved),
            "as published": _by_complex_numbers if interleaved else _by_halves,
            "torch.compile": compiled(_plain(interleaved)),
        }
        read = math.prod(shape[2:]) // 2 * precise.itemsize
        yield KernelCase(
            "rotate",
            model,
            f"{list(shape)} bfloat16, {'pairs' if interleaved else 'halves'}",
            _inputs(shape, precise),
            ways,
            4 * math.prod(shape) + read,
            target={"plain": 3.0, "torch.compile": 1.0},
        )

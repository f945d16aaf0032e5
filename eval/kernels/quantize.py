"""Coding of keys and values, and attention to their codes, at the sizes of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.eval.kernels.case import KernelCase, compiled
from diffcache.kernels import coded, quantize

MODEL = "Llama-3.1-8B"
HEADS, QUERIES, SLOTS, SIZE = 8, 32, 32768, 128
GROUP = 32


def _tensor(device: torch.device, tiny: bool) -> Tensor:
    slots = 64 if tiny else SLOTS
    return torch.randn(1, HEADS, slots, SIZE, device=device, dtype=torch.float16)


def _coded(x: Tensor, bits: int, each: int, width: int) -> tuple[Tensor, Tensor]:
    return quantize.quant_groups(x, bits, each, width, 2**bits - 1, False)


def _restored(codes: Tensor, grid: Tensor, bits: int, each: int, width: int, kernel: bool) -> Tensor:
    shape = (*codes.shape[:3], codes.shape[3] * 8 // bits)
    out = torch.empty(shape, dtype=torch.float16, device=codes.device)
    run = quantize.DEQUANT if kernel else quantize.dequant_twin
    run(codes, grid, out, bits, each, width, 0.0, None)
    return out


def _coding(bits: int, each: int, width: int) -> KernelCase:
    settings = bits, each, width, 2.0**bits - 1, False, torch.float16

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize.quant_twin(x, *settings)

    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda x: quantize.QUANT(x, *settings),
        "plain": plain,
        "torch.compile": compiled(plain),
    }
    count = HEADS * SLOTS * SIZE
    moved = 2 * count + count * bits // 8 + 4 * count // GROUP
    axis = "tokens" if width == 1 else "channels"
    return KernelCase(
        "quant_groups",
        MODEL,
        f"[1, {HEADS}, {SLOTS}, {SIZE}], {bits} bits, {GROUP} {axis}",
        lambda device, tiny: (_tensor(device, tiny),),
        ways,
        moved,
        target={"torch.compile": 2.0},
    )


def _restoring(bits: int, each: int, width: int) -> KernelCase:
    def make(device: torch.device, tiny: bool) -> tuple[Tensor, Tensor]:
        return _coded(_tensor(device, tiny), bits, each, width)

    def plain(codes: Tensor, grid: Tensor) -> Tensor:
        return _restored(codes, grid, bits, each, width, kernel=False)

    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda codes, grid: _restored(codes, grid, bits, each, width, kernel=True),
        "plain": plain,
        "torch.compile": compiled(plain),
    }
    count = HEADS * SLOTS * SIZE
    moved = 2 * count + count * bits // 8 + 4 * count // GROUP
    axis = "tokens" if width == 1 else "channels"
    return KernelCase(
        "dequant_groups",
        MODEL,
        f"[1, {HEADS}, {SLOTS}, {SIZE}], {bits} bits, {GROUP} {axis}",
        make,
        ways,
        moved,
        target={"limit": 0.75},
    )


def _attending(bits: int) -> KernelCase:
    settings = SIZE**-0.5, bits, bits, GROUP, GROUP, 0.0, 0.0

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        k, v = _tensor(device, tiny), _tensor(device, tiny)
        q = torch.randn(1, QUERIES, SIZE, device=device, dtype=torch.float16)
        return q, *_coded(k, bits, GROUP, 1), *_coded(v, bits, 1, GROUP)

    def decoded(q: Tensor, k: Tensor, kg: Tensor, v: Tensor, vg: Tensor) -> Tensor:
        keys = _restored(k, kg, bits, GROUP, 1, kernel=False)
        values = _restored(v, vg, bits, 1, GROUP, kernel=False)
        rows = q.view(len(q), HEADS, -1, SIZE)
        return functional.scaled_dot_product_attention(rows, keys, values).flatten(1, 2)

    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, kg, v, vg: coded.ATTEND(q, k, kg, v, vg, *settings)[0],
        "plain": lambda q, k, kg, v, vg: coded.attend_twin(q, k, kg, v, vg, *settings)[0],
        "decoded, then SDPA": decoded,
        "torch.compile": compiled(decoded),
    }
    count = 2 * HEADS * SLOTS * SIZE
    return KernelCase(
        "attn_decode_kivi",
        MODEL,
        f"{QUERIES}/{HEADS} heads, {SLOTS} slots of {bits} bits",
        make,
        ways,
        count * bits // 8 + 4 * count // GROUP,
        4 * QUERIES * SLOTS * SIZE,
        target={"decoded, then SDPA": 5.0},
        instead="decoded, then SDPA",
    )


def cases() -> list[KernelCase]:
    """Return the rows of the benchmark."""
    found = []
    for bits in (2, 4, 8):
        for each, width in ((GROUP, 1), (1, GROUP)):
            found += [_coding(bits, each, width), _restoring(bits, each, width)]
        found.append(_attending(bits))
    return found

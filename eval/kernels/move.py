"""Slots written in place and gathered, at the sizes of Llama-3-8B, LLaDA-8B and DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kernels.case import KernelCase
from diffcache.kernels import move

# Heads, slots, channels of keys and of values, slots that are moved.
WRITTEN = {"LLaDA-8B": (32, 4096, 128, 128, 64), "DeepSeek-V3": (1, 32768, 512, 64, 64)}
KEPT = {"Llama-3-8B": (8, 32768, 128, 128, 4096), "DeepSeek-V3": (1, 32768, 512, 64, 4096)}
Size = tuple[int, int, int, int, int]


def _inputs(size: Size, *, written: bool) -> Callable[[torch.device, bool], tuple[Tensor, ...]]:
    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        heads, slots, k_size, v_size, count = (2, 9, 16, 8, 4) if tiny else size
        given: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        k, v = (torch.randn(1, heads, slots, n, **given) for n in (k_size, v_size))
        rows = 1 if written else heads
        index = torch.rand(rows, slots, device=device).argsort(-1)[:, :count].sort(-1).values
        if not written:
            return k, v, index[None]
        # Projections leave tokens before heads.
        new_k, new_v = (torch.randn(1, count, heads, n, **given).transpose(1, 2) for n in (k_size, v_size))
        return k, v, new_k, new_v, index

    return make


def _scatter(*given: Tensor) -> tuple[Tensor, Tensor]:
    move.SCATTER(*given)
    return given[0], given[1]


def _scatter_plain(*given: Tensor) -> tuple[Tensor, Tensor]:
    move.scatter_twin(*given)
    return given[0], given[1]


def _scatter_channels(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Write by a list that names the slot of every channel."""
    for buffer, fresh in ((k, new_k), (v, new_v)):
        buffer.scatter_(2, index[:, None, :, None].expand_as(fresh), fresh)
    return k, v


def _gather_channels(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather by a list that names the slot of every channel, as presses of KVPress do."""
    wide = index[..., None]
    return (k.gather(2, wide.expand(-1, -1, -1, k.shape[3])), v.gather(2, wide.expand(-1, -1, -1, v.shape[3])))


def _row(operator: str, model: str, size: Size, ways: dict[str, Callable[..., Any]], written: bool) -> KernelCase:
    heads, slots, k_size, v_size, count = size
    shapes = f"{count} of [1, {heads}, {slots}, {k_size} and {v_size}] bfloat16"
    return KernelCase(
        operator,
        model,
        shapes,
        _inputs(size, written=written),
        ways,
        2 * 2 * heads * count * (k_size + v_size),
        tolerance=0.0,
        target={"plain": 1.5},
    )


def cases() -> list[KernelCase]:
    """Return the rows of the benchmark."""
    scatter: dict[str, Callable[..., Any]] = {
        "kernel": _scatter,
        "plain": _scatter_plain,
        "by channels": _scatter_channels,
    }
    gather: dict[str, Callable[..., Any]] = {
        "kernel": move.GATHER,
        "plain": move.gather_twin,
        "by channels": _gather_channels,
    }
    found = [_row("kv_scatter", model, size, scatter, True) for model, size in WRITTEN.items()]
    return found + [_row("kv_gather", model, size, gather, False) for model, size in KEPT.items()]

"""Merged parts, masses and decoding at the sizes of FLUX.1-dev, Wan2.1-1.3B and Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffcache.eval.kernels.case import KernelCase, compiled
from diffcache.kernels import decode, dense, mass, merge

# Query heads, key heads, queries, keys, channels.
Sizes = tuple[int, int, int, int, int]
FLUX: Sizes = (24, 24, 4608, 4608, 128)
WAN: Sizes = (12, 12, 1560, 32760, 128)  # one frame of queries
CHUNK: Sizes = (12, 12, 4680, 32760, 128)  # three
LLAMA: Sizes = (32, 8, 1, 32768, 128)
TINY: Sizes = (4, 2, 8, 160, 32)


def _attention(
    sizes: Sizes, small: Sizes = TINY
) -> Callable[[torch.device, bool], tuple[Tensor, Tensor, Tensor]]:
    def make(device: torch.device, tiny: bool) -> tuple[Tensor, Tensor, Tensor]:
        asking, heads, count, width, size = small if tiny else sizes
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        q = torch.randn(1, asking, count, size, **kind)
        k, v = torch.randn(2, 1, heads, width, size, **kind).unbind()
        return q, k, v

    return make


def _parts(device: torch.device, tiny: bool) -> tuple[list[Tensor], list[Tensor]]:
    asking, _, count, _, size = TINY if tiny else FLUX
    outs = torch.randn(2, 1, asking, count, size, device=device)
    return list(outs.unbind()), list(outs.new_empty(outs.shape[:-1]).normal_().unbind())


def _scale(q: Tensor) -> float:
    return float(q.shape[3] ** -0.5)


def _matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add up the columns of a matrix of attention that is held whole."""
    own = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    weights = (q @ own.mT * _scale(q)).softmax(-1, dtype=torch.float32)
    columns: Tensor = weights.sum(2).unflatten(1, (k.shape[1], -1)).sum(2)
    return columns


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with a copy of keys and values for every query head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (q @ k.mT * _scale(q)).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _logs(model: str, sizes: Sizes) -> KernelCase:
    asking, heads, count, width, size = sizes
    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, v: mass.LSE(q, k, _scale(q), None),
        "plain": lambda q, k, v: mass.lse_twin(q, k, _scale(q), None),
    }
    moved = 2 * size * (asking * count + heads * width) + 4 * asking * count
    return KernelCase(
        "attn_lse", model, f"q {[1, asking, count, size]}, k {[1, heads, width, size]} bfloat16",
        _attention(sizes), ways, moved, 2 * asking * count * width * size, target={"plain": 2.0},
    )  # fmt: skip


def _masses(model: str, sizes: Sizes) -> KernelCase:
    asking, heads, count, width, size = sizes
    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, v: mass.MASS(q, k, mass.LSE(q, k, _scale(q), None), _scale(q), None),
        "plain": lambda q, k, v: mass.mass_twin(
            q, k, mass.lse_twin(q, k, _scale(q), None), _scale(q), None
        ),
        "whole matrix": _matrix,
    }
    moved = 2 * 2 * size * (asking * count + heads * width) + 4 * heads * width
    return KernelCase(
        "attn_mass", model, f"q {[1, asking, count, size]}, k {[1, heads, width, size]} bfloat16",
        _attention(sizes), ways, moved, 4 * asking * count * width * size,
        target={"whole matrix": 5.0}, instead="whole matrix",
    )  # fmt: skip


def _decoding() -> KernelCase:
    asking, heads, count, width, size = LLAMA
    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, v: decode.DECODE(q, k, v, _scale(q), None, None, 0)[0],
        "plain": lambda q, k, v: decode.decode_twin(q, k, v, _scale(q), None, None, 0)[0],
        "fused": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "repeated heads": _repeated,
    }
    return KernelCase(
        "attn_decode", "Llama 3.1 8B", f"q {[1, asking, count, size]}, k and v "
        f"{[1, heads, width, size]} bfloat16", _attention(LLAMA), ways,
        2 * (2 * heads * width * size + 2 * asking * count * size),
        4 * asking * count * width * size,
        target={"fused": 1.0, "repeated heads": 4.0, "limit": 0.8}, instead="fused",
    )  # fmt: skip


def _only(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return dense attention by one backend of torch; of a CPU, which has none of them, by any."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend] if q.is_cuda else dense.ORDER):
            return functional.scaled_dot_product_attention(q, k, v)

    return attend


def _dense(model: str, sizes: Sizes) -> KernelCase:
    asking, heads, count, width, size = sizes
    ways: dict[str, Callable[..., Any]] = {
        "kernel": _only(SDPBackend.CUDNN_ATTENTION),
        "plain": functional.scaled_dot_product_attention,
        "FlashAttention": _only(SDPBackend.FLASH_ATTENTION),
    }
    return KernelCase(
        dense.NAME, model, f"q {[1, asking, count, size]}, k and v {[1, heads, width, size]} "
        "bfloat16", _attention(sizes, (2, 2, 8, 160, 32)), ways,
        2 * 2 * size * (asking * count + heads * width), 4 * asking * count * width * size,
    )  # fmt: skip


def cases() -> list[KernelCase]:
    """Return the rows of the benchmark."""
    asking, _, count, _, size = FLUX
    merges: dict[str, Callable[..., Any]] = {
        "kernel": merge.MERGE,
        "plain": merge.merge_twin,
        "torch.compile": compiled(merge.merge_twin),
    }
    parts = KernelCase(
        "lse_merge", "FLUX.1-dev", f"two parts {[1, asking, count, size]} float32", _parts, merges,
        3 * 4 * asking * count * (size + 1), target={"plain": 3.0, "torch.compile": 1.0},
    )  # fmt: skip
    masses = [_masses("FLUX.1-dev", FLUX), _masses("Wan2.1-1.3B", WAN)]
    denses = [_dense("FLUX.1-dev", FLUX), _dense("Wan2.1-1.3B", CHUNK)]
    return [parts, _logs("FLUX.1-dev", FLUX), *masses, _decoding(), *denses]

"""Merged parts, masses and attention at the sizes of FLUX.1-dev, Wan2.1-1.3B and Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffcache.eval.kernels.case import KernelCase, compiled
from diffcache.kernels import dense, int8, merge, quantize
from diffcache.kernels.attention import FORWARD, MASS, Codes, _apart, forward_twin, mass_twin

# Query heads, key heads, queries, keys, channels.
Sizes = tuple[int, int, int, int, int]
FLUX: Sizes = (24, 24, 4608, 4608, 128)
WAN: Sizes = (12, 12, 1560, 32760, 128)  # one frame of queries
CHUNK: Sizes = (12, 12, 4680, 32760, 128)  # three
LLAMA: Sizes = (32, 8, 1, 32768, 128)
TINY: Sizes = (4, 2, 8, 160, 32)


def _attention(sizes: Sizes, small: Sizes = TINY) -> Callable[[torch.device, bool], tuple[Tensor, Tensor, Tensor]]:
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


def _given(q: Tensor, k: Any, v: Any = None, **seen: Any) -> tuple[Any, ...]:
    """Return the arguments of `attn_forward` as the operator takes them."""
    (keys, key_grid, *form), (values, value_grid, *more) = _apart(k), _apart(v)
    limits = (False, seen.get("offset"), seen.get("window", 0), 0)
    tensors = keys, key_grid, seen.get("slots"), None, None, values, value_grid
    return (q, *tensors, _scale(q), *limits, *form, *more)


def _summed(forward: Callable[..., Any], mass: Callable[..., Any], q: Tensor, k: Tensor) -> Any:
    """Return the masses of keys, with the log-sum-exps they take."""
    given = _given(q, k)
    return mass(*given[:6], forward(*given)[1], *given[8:-2])


def _masses(model: str, sizes: Sizes) -> KernelCase:
    asking, heads, count, width, size = sizes
    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, v: _summed(FORWARD, MASS, q, k),
        "plain": lambda q, k, v: _summed(forward_twin, mass_twin, q, k),
        "whole matrix": _matrix,
    }
    moved = 2 * 2 * size * (asking * count + heads * width) + 4 * heads * width
    return KernelCase(
        "attn_mass",
        model,
        f"q {[1, asking, count, size]}, k {[1, heads, width, size]} bfloat16",
        _attention(sizes),
        ways,
        moved,
        4 * asking * count * width * size,
        target={"whole matrix": 5.0},
        instead="whole matrix",
    )


def _listing() -> KernelCase:
    """Return the row of a generated token that attends to a sixteenth of the slots, by a list."""
    asking, heads, count, width, size = LLAMA
    kept = width // 16

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        q, k, v = _attention(LLAMA)(device, tiny)
        few = k.shape[2] // 16
        order = torch.rand(1, k.shape[1], k.shape[2], device=device).argsort(-1)
        return q, k, v, order[..., :few].sort(-1).values

    def gathered(q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        k, v = (x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, v, slots: FORWARD(*_given(q, k, v, slots=slots))[0],
        "plain": lambda q, k, v, slots: forward_twin(*_given(q, k, v, slots=slots))[0],
        "gathered, then SDPA": gathered,
    }
    return KernelCase(
        "attn_forward",
        "Llama 3.1 8B",
        f"q {[1, asking, count, size]}, {kept} of k and v {[1, heads, width, size]} bfloat16",
        make,
        ways,
        2 * (2 * heads * kept * size + 2 * asking * count * size) + 8 * heads * kept,
        4 * asking * count * kept * size,
        target={"gathered, then SDPA": 1.5},
        instead="gathered, then SDPA",
    )


def _history() -> KernelCase:
    """Return the row of a chunk of video that attends to frames of 4 bits."""
    asking, heads, count, width, size = CHUNK
    width -= width % 32
    group = 32

    def coded(x: Tensor, each: int, wide: int) -> Codes:
        return Codes(*quantize.quant_groups(x, 4, each, wide, 15, False), 4, each, wide)

    def make(device: torch.device, tiny: bool) -> tuple[Any, ...]:
        q, k, v = _attention((asking, heads, count, width, size))(device, tiny)
        return q, *coded(k, group, 1)[:2], *coded(v, 1, group)[:2]

    def held(k: Tensor, kg: Tensor, v: Tensor, vg: Tensor) -> tuple[Codes, Codes]:
        return Codes(k, kg, 4, group, 1), Codes(v, vg, 4, 1, group)

    def decoded(q: Tensor, *codes: Tensor) -> Tensor:
        pair = []
        for each in held(*codes):
            out = q.new_empty(*each.codes.shape[:3], each.size)
            quantize.dequant_groups(each.codes, each.grid, out, *each[2:])
            pair.append(out)
        k, v = pair
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=len(q[0]) != len(k[0]))

    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, *codes: FORWARD(*_given(q, *held(*codes)))[0],
        "plain": lambda q, *codes: forward_twin(*_given(q, *held(*codes)))[0],
        "decoded, then SDPA": decoded,
    }
    numbers = 2 * heads * width * size
    return KernelCase(
        "attn_forward",
        "Wan2.1-1.3B",
        f"q {[1, asking, count, size]} bfloat16, k and v {[1, heads, width, size]} of 4 bits",
        make,
        ways,
        numbers // 2 + 4 * numbers // group + 4 * asking * count * size,
        4 * asking * count * width * size,
        instead="decoded, then SDPA",
    )


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
        dense.NAME,
        model,
        f"q {[1, asking, count, size]}, k and v {[1, heads, width, size]} bfloat16",
        _attention(sizes, (2, 2, 8, 160, 32)),
        ways,
        2 * 2 * size * (asking * count + heads * width),
        4 * asking * count * width * size,
    )


def _rounded(model: str, sizes: Sizes) -> KernelCase:
    """Return a row of attention on 8 bits, which has to beat what torch does without."""
    asking, heads, count, width, size = sizes
    ways: dict[str, Callable[..., Any]] = {
        "kernel": lambda q, k, v: int8.INT8(q, k, v, _scale(q)),
        "plain": lambda q, k, v: int8.int8_twin(q, k, v, _scale(q)),
        "SDPA": functional.scaled_dot_product_attention,
    }
    moved = 2 * 2 * size * (asking * count + heads * width)
    return KernelCase(
        "attn_int8",
        model,
        f"q {[1, asking, count, size]}, k and v {[1, heads, width, size]} bfloat16",
        _attention(sizes, (2, 2, 8, 160, 32)),
        ways,
        moved,
        4 * asking * count * width * size,
        instead="SDPA",
    )


def cases() -> list[KernelCase]:
    """Return the rows of the benchmark."""
    asking, _, count, _, size = FLUX
    merges: dict[str, Callable[..., Any]] = {
        "kernel": merge.MERGE,
        "plain": merge.merge_twin,
        "torch.compile": compiled(merge.merge_twin),
    }
    parts = KernelCase(
        "lse_merge",
        "FLUX.1-dev",
        f"two parts {[1, asking, count, size]} float32",
        _parts,
        merges,
        3 * 4 * asking * count * (size + 1),
        target={"plain": 3.0, "torch.compile": 1.0},
    )
    masses = [_masses("FLUX.1-dev", FLUX), _masses("Wan2.1-1.3B", WAN)]
    denses = [_dense("FLUX.1-dev", FLUX), _dense("Wan2.1-1.3B", CHUNK)]
    rounded = [_rounded("FLUX.1-dev", FLUX), _rounded("Wan2.1-1.3B", CHUNK)]
    return [parts, *masses, _listing(), _history(), *denses, *rounded]

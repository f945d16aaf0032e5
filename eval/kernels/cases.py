"""Rows of all operators at the sizes of real models, with rivals and the bytes that must move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffcache.kernels import (
    coded,
    codes,
    dense,
    distance,
    forecast,
    int8,
    linear,
    merge,
    move,
    quantize,
    rotary,
    rows,
)
from diffcache.kernels.attention import FORWARD, MASS, Codes, _apart, forward_twin, mass_twin
from diffcache.quant.integer import int_matmul

Ways = dict[str, Callable[..., Any]]
Make = Callable[[torch.device, bool], tuple[Any, ...]]
FEATURES = {"FLUX.1-dev": (4608, 3072), "Wan2.1-1.3B": (4680, 1536)}  # tokens and channels


@dataclass(frozen=True)
class KernelCase:
    """One operator at the sizes of one model."""

    operator: str  # name in `torch.ops.diffcache`
    model: str  # whose sizes these are
    shapes: str  # shapes and settings, as a reader of the table needs them
    # Takes a device and whether sizes are tiny, and returns what the ways are called with: random numbers, a fresh
    # set at every call
    make: Make
    # Name -> how the same result is had. `kernel` calls the operator, `plain` its twin; others are rivals. Each
    # returns its results
    ways: dict[str, Callable[..., Any]]
    moved: int  # least bytes that are read and written, at the sizes of the model
    flops: int = 0  # operations of products of matrices, at the sizes of the model
    tolerance: float = 2e-2  # largest error of a way, as a norm relative to `plain`
    # Aims of the kernel: name of another way -> times as fast, `limit` -> share of the bandwidth of a copy
    target: dict[str, float] = field(default_factory=dict)
    # The way that the library goes where the kernel does not run; a kernel is chosen where it is faster than that
    instead: str = "plain"


def tensors(count: int, shape: tuple[int, int]) -> Make:
    """Return a function that draws random tensors of a shape, or of a tiny one, in bfloat16."""

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        size = (8, 64) if tiny else shape
        return torch.randn(count, *size, device=device, dtype=torch.bfloat16).unbind()

    return make


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch compiles at its first call; importing its compiler is slow."""
    made: list[Callable[..., Any]] = []

    def call(*given: Any) -> Any:
        if not made:
            made.append(torch.compile(run))
        return made[0](*given)

    return call


# attention -------------------------------------------------------------------------------------

# Query heads, key heads, queries, keys, channels.
Sizes = tuple[int, int, int, int, int]
FLUX: Sizes = (24, 24, 4608, 4608, 128)
WAN: Sizes = (12, 12, 1560, 32760, 128)  # one frame of queries
CHUNK: Sizes = (12, 12, 4680, 32760, 128)  # three
LLAMA: Sizes = (32, 8, 1, 32768, 128)
TINY: Sizes = (4, 2, 8, 160, 32)
ALIKE: Sizes = (2, 2, 8, 160, 32)  # as many heads of keys


def drawn(sizes: Sizes, small: Sizes = TINY) -> Make:
    """Return a function that draws random queries, keys and values in bfloat16."""

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, Tensor, Tensor]:
        asking, heads, count, width, size = small if tiny else sizes
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        q = torch.randn(1, asking, count, size, **kind)
        k, v = torch.randn(2, 1, heads, width, size, **kind).unbind()
        return q, k, v

    return make


def attended(
    operator: str,
    model: str,
    sizes: Sizes,
    ways: Ways,
    about: str = "k and v",
    small: Sizes = TINY,
    more: int = 0,
    **others: Any,
) -> KernelCase:
    """Return a row of attention of all queries to all keys, in bfloat16.

    Args:
        operator: Name in `torch.ops.diffcache`.
        model: Model that has these sizes.
        sizes: Query heads, key heads, queries, keys, channels.
        ways: Name -> function, as in `KernelCase`.
        about: What keys and values are called in the row.
        small: Sizes on a CPU.
        more: Bytes that move besides queries, keys, values and outputs.
        **others: Further fields of `KernelCase`.
    """
    asking, heads, count, width, size = sizes
    shapes = f"q {[1, asking, count, size]}, {about} {[1, heads, width, size]} bfloat16"
    moved = 2 * 2 * size * (asking * count + heads * width) + more
    flops = 4 * asking * count * width * size
    return KernelCase(operator, model, shapes, drawn(sizes, small), ways, moved, flops, **others)


def _scale(q: Tensor) -> float:
    return float(q.shape[3] ** -0.5)


def given(q: Tensor, k: Any, v: Any = None, **seen: Any) -> tuple[Any, ...]:
    """Return the arguments of `attn_forward` as the operator takes them."""
    (keys, key_grid, *form), (values, value_grid, *more) = _apart(k), _apart(v)
    limits = (False, seen.get("offset"), seen.get("window", 0), 0)
    tensors = keys, key_grid, seen.get("slots"), None, None, values, value_grid
    return (q, *tensors, _scale(q), *limits, *form, *more)


def _masses(model: str, sizes: Sizes) -> KernelCase:
    def summed(forward: Callable[..., Any], mass: Callable[..., Any], q: Tensor, k: Tensor) -> Any:
        """Return the masses of keys, with the log-sum-exps they take."""
        asked = given(q, k)
        return mass(*asked[:6], forward(*asked)[1], *asked[8:-2])

    def matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add up the columns of a matrix of attention that is held whole."""
        own = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        weights = (q @ own.mT * _scale(q)).softmax(-1, dtype=torch.float32)
        columns: Tensor = weights.sum(2).unflatten(1, (k.shape[1], -1)).sum(2)
        return columns

    ways: Ways = {
        "kernel": lambda q, k, v: summed(FORWARD, MASS, q, k),
        "plain": lambda q, k, v: summed(forward_twin, mass_twin, q, k),
        "whole matrix": matrix,
    }
    target = {"whole matrix": 5.0}
    return attended(
        "attn_mass", model, sizes, ways, "k", more=4 * sizes[1] * sizes[3], target=target, instead="whole matrix"
    )


def _listing() -> KernelCase:
    """Return the row of a generated token that attends to a sixteenth of the slots, by a list."""
    asking, heads, count, width, size = LLAMA
    kept = width // 16

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        q, k, v = drawn(LLAMA)(device, tiny)
        few = k.shape[2] // 16
        order = torch.rand(1, k.shape[1], k.shape[2], device=device).argsort(-1)
        return q, k, v, order[..., :few].sort(-1).values

    def gathered(q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        k, v = (x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    ways: Ways = {
        "kernel": lambda q, k, v, slots: FORWARD(*given(q, k, v, slots=slots))[0],
        "plain": lambda q, k, v, slots: forward_twin(*given(q, k, v, slots=slots))[0],
        "gathered, then SDPA": gathered,
    }
    shapes = f"q {[1, asking, count, size]}, {kept} of k and v {[1, heads, width, size]} bfloat16"
    moved = 2 * (2 * heads * kept * size + 2 * asking * count * size) + 8 * heads * kept
    flops, against = 4 * asking * count * kept * size, "gathered, then SDPA"
    return KernelCase(
        "attn_forward", "Llama 3.1 8B", shapes, make, ways, moved, flops, target={against: 1.5}, instead=against
    )


def _history() -> KernelCase:
    """Return the row of a chunk of video that attends to frames of 4 bits."""
    asking, heads, count, width, size = CHUNK
    width -= width % 32
    group = 32

    def coded(x: Tensor, each: int, wide: int) -> Codes:
        return Codes(*quantize.quant_groups(x, 4, each, wide, 15, False), 4, each, wide)

    def make(device: torch.device, tiny: bool) -> tuple[Any, ...]:
        q, k, v = drawn((asking, heads, count, width, size))(device, tiny)
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

    ways: Ways = {
        "kernel": lambda q, *codes: FORWARD(*given(q, *held(*codes)))[0],
        "plain": lambda q, *codes: forward_twin(*given(q, *held(*codes)))[0],
        "decoded, then SDPA": decoded,
    }
    numbers, flops = 2 * heads * width * size, 4 * asking * count * width * size
    shapes = f"q {[1, asking, count, size]} bfloat16, k and v {[1, heads, width, size]} of 4 bits"
    moved = numbers // 2 + 4 * numbers // group + 4 * asking * count * size
    return KernelCase("attn_forward", "Wan2.1-1.3B", shapes, make, ways, moved, flops, instead="decoded, then SDPA")


def _only(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return dense attention by one backend of torch; of a CPU, which has none of them, by any."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend] if q.is_cuda else dense.ORDER):
            return functional.scaled_dot_product_attention(q, k, v)

    return attend


def _attention() -> Iterator[KernelCase]:
    def parts(device: torch.device, tiny: bool) -> tuple[list[Tensor], list[Tensor]]:
        asking, _, count, _, size = TINY if tiny else FLUX
        outs = torch.randn(2, 1, asking, count, size, device=device)
        return list(outs.unbind()), list(outs.new_empty(outs.shape[:-1]).normal_().unbind())

    asking, _, count, _, size = FLUX
    merges: Ways = {"kernel": merge.MERGE, "plain": merge.merge_twin, "torch.compile": compiled(merge.merge_twin)}
    shapes, moved = f"two parts {[1, asking, count, size]} float32", 3 * 4 * asking * count * (size + 1)
    target = {"plain": 3.0, "torch.compile": 1.0}
    yield KernelCase("lse_merge", "FLUX.1-dev", shapes, parts, merges, moved, target=target)
    yield from (_masses("FLUX.1-dev", FLUX), _masses("Wan2.1-1.3B", WAN), _listing(), _history())
    whole: Ways = {
        "kernel": _only(SDPBackend.CUDNN_ATTENTION),
        "plain": functional.scaled_dot_product_attention,
        "FlashAttention": _only(SDPBackend.FLASH_ATTENTION),
    }
    rounded: Ways = {  # on 8 bits, which has to beat what torch does without
        "kernel": lambda q, k, v: int8.INT8(q, k, v, _scale(q)),
        "plain": lambda q, k, v: int8.int8_twin(q, k, v, _scale(q)),
        "SDPA": functional.scaled_dot_product_attention,
    }
    for name, ways, instead in ((dense.NAME, whole, "plain"), ("attn_int8", rounded, "SDPA")):
        yield attended(name, "FLUX.1-dev", FLUX, ways, small=ALIKE, instead=instead)
        yield attended(name, "Wan2.1-1.3B", CHUNK, ways, small=ALIKE, instead=instead)


# features ----------------------------------------------------------------------------------------


def _codes() -> Iterator[KernelCase]:
    """Yield rows of codes of the inputs of quantized layers."""
    scale, zero = 6 / 255, 128

    def plain(values: Tensor) -> Tensor:
        return codes.codes_twin(values, scale, zero, 8)

    ways: Ways = {
        "kernel": lambda values: codes.CODES(values, scale, zero, None, None, 8),
        "plain": plain,
        "torch.compile": compiled(plain),
    }
    for model, shape in FEATURES.items():
        made, moved = tensors(1, shape), 3 * math.prod(shape)
        yield KernelCase("int8_codes", model, f"{list(shape)} bfloat16", made, ways, moved, target={"plain": 4.0})


def _distance() -> Iterator[KernelCase]:
    """Yield rows of the error that gates compare with their threshold, at the sizes of their probes."""

    def published(values: Tensor, reference: Tensor) -> Tensor:
        """Divide means in the dtype of the probe, as TeaCache's own code does."""
        return (values - reference).abs().mean() / reference.abs().mean()

    def of(sums: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def ratio(values: Tensor, reference: Tensor) -> Tensor:
            change, scale = sums(values, reference).unbind()
            return change / scale

        return ratio

    plain = of(distance.sums_twin)
    ways: Ways = {"kernel": of(distance.SUMS), "plain": plain, "as published": published}
    ways["torch.compile"] = compiled(plain)
    for model, shape in FEATURES.items():
        shapes, moved = f"{list(shape)} bfloat16", 2 * 2 * math.prod(shape)
        yield KernelCase("l1_sums", model, shapes, tensors(2, shape), ways, moved, target={"as published": 3.5})


DISTANCE = 3  # steps ahead
WEIGHTS = [DISTANCE**power / math.factorial(power) for power in range(3)]  # of Taylor's forecast


def _forecast() -> Iterator[KernelCase]:
    """Yield rows of forecasts and of their differences."""

    def published(terms: Sequence[Tensor], base: Tensor) -> Any:
        """Forecast with the operations of TaylorSeer's own code: a product and a sum for each order."""
        total: Any = 0
        for power, term in enumerate(terms):
            total = total + (1 / math.factorial(power)) * term * (DISTANCE**power)
        return base + total

    def plain_sum(terms: list[Tensor], base: Tensor) -> Tensor:
        return forecast.sum_twin(terms, WEIGHTS, base, None)

    def differences(terms: list[Tensor], fresh: Tensor) -> list[Tensor]:
        forecast.DIFFERENCES(fresh, terms[:2], terms[1:], [5.0, 5.0])
        return terms[1:]

    def plain(terms: list[Tensor], fresh: Tensor) -> list[Tensor]:
        return forecast.differences_twin(fresh, terms[:2], [5.0, 5.0])

    sums: Ways = {
        "kernel": lambda terms, base: forecast.SUM(terms, WEIGHTS, base, None),
        "plain": plain_sum,
        "as published": published,
        "torch.compile": compiled(plain_sum),
    }
    others: Ways = {"kernel": differences, "plain": plain, "torch.compile": compiled(plain)}
    for model, shape in FEATURES.items():

        def make(device: torch.device, tiny: bool, shape: Any = shape) -> tuple[list[Tensor], Tensor]:
            base, *terms = tensors(4, shape)(device, tiny)
            return terms, base

        moved, shown = 5 * 2 * math.prod(shape), f"{list(shape)} bfloat16, order 2"
        aims = {"as published": 4.0, "limit": 1 / 1.15}
        yield KernelCase("weighted_sum", model, f"{shown}, and a base", make, sums, moved, target=aims)
        yield KernelCase("finite_differences", model, shown, make, others, moved, target={"plain": 1.5})


def products() -> Iterator[KernelCase]:
    """Yield rows of products of int8 codes at the sizes of the widest layers."""
    zero, bfloat16 = 3, torch.bfloat16

    def in_steps(dense: Any, rows: Tensor, codes: Tensor, terms: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
        """Multiply with torch's own int8 product where it takes the shapes, and scale after it."""
        sums, zeros = terms
        out = int_matmul(rows, codes)
        out -= rows.sum(1, keepdim=True, dtype=torch.int32) * zeros
        out += zero * (rows.shape[1] * zeros - sums)
        return out.float().mul_(factor).add_(shift).bfloat16()

    def by(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda dense, rows, codes, terms, *more: run(rows, codes, terms, zero, *more, bfloat16)

    ways: Ways = {
        "kernel": by(linear.linear_of_codes),
        "plain": by(linear.linear_twin),
        "in steps": in_steps,
        "dense": lambda dense, *_: functional.linear(*dense),  # the numbers that the codes stand for
    }
    for model, shape in {"FLUX.1-dev": (4608, 3072, 12288), "Wan2.1-1.3B": (4680, 1536, 8960)}.items():

        def make(device: torch.device, tiny: bool, shape: tuple[int, int, int] = shape) -> tuple[Any, ...]:
            height, depth, width = (24, 64, 40) if tiny else shape
            rows, codes = (
                torch.randint(-128, 128, (n, depth), device=device, dtype=torch.int8) for n in (height, width)
            )
            zeros = torch.randint(-9, 10, (width,), device=device, dtype=torch.int32)
            terms = torch.stack((codes.sum(1, dtype=torch.int32), zeros))
            factor = torch.rand(width, device=device) / 5000 / depth**0.5
            shift = torch.randn(width, device=device)
            weight = ((codes - zeros[:, None]) * factor[:, None]).bfloat16()
            return ((rows.int() - zero).bfloat16(), weight, shift.bfloat16()), rows, codes, terms, factor, shift

        height, depth, width = shape
        shapes, moved = f"[{height}, {depth}] x [{width}, {depth}] int8", (height + width) * depth + 2 * height * width
        flops, aims = 2 * height * depth * width, {"in steps": 1.2, "dense": 1.2}
        yield KernelCase("linear_of_codes", model, shapes, make, ways, moved, flops, target=aims, instead="in steps")


def _rows() -> Iterator[KernelCase]:
    """Yield rows of features held as int8 codes, and of forecasts from them."""

    def plain(codes: list[Tensor], scales: list[Tensor], base: Tensor) -> Tensor:
        return rows.weighted_sum_int8_twin(codes, scales, WEIGHTS, base, base.dtype)

    def unpack_first(codes: Sequence[Tensor], scales: Sequence[Tensor], base: Tensor) -> Any:
        """Unpack with one kernel for each term, and sum the terms with another."""
        pairs = zip(codes, scales, strict=True)
        terms = [rows.SUM([code], [scale], [1.0], None, base.dtype) for code, scale in pairs]
        return forecast.SUM(terms, WEIGHTS, base, None)

    packs: Ways = {"kernel": rows.PACK, "plain": rows.pack_twin, "torch.compile": compiled(rows.pack_twin)}
    sums: Ways = {
        "kernel": lambda codes, scales, base: rows.SUM(codes, scales, WEIGHTS, base, base.dtype),
        "plain": plain,
        "unpack first": unpack_first,
        "torch.compile": compiled(plain),
    }
    for model, shape in FEATURES.items():

        def held(device: torch.device, tiny: bool, shape: Any = shape) -> tuple[list[Tensor], list[Tensor], Tensor]:
            size = (len(WEIGHTS), *((8, 64) if tiny else shape))
            codes = torch.randint(-127, 128, size, device=device, dtype=torch.int8)
            scales = torch.rand(*size[:-1], 1, device=device).add(0.1).to(torch.bfloat16) / 127
            (base,) = tensors(1, shape)(device, tiny)
            return list(codes.unbind()), list(scales.unbind()), base

        count, tokens = math.prod(shape), shape[0]
        shapes, moved, aims = f"{list(shape)} bfloat16", 3 * count + 2 * tokens, {"plain": 4.0, "unpack first": 1.5}
        yield KernelCase("pack_rows", model, shapes, tensors(1, shape), packs, moved, target={"plain": 4.0})
        shapes, moved = f"{list(shape)} int8, order 2, and a bfloat16 base", 3 * (count + 2 * tokens) + 2 * 2 * count
        yield KernelCase("weighted_sum_int8", model, shapes, held, sums, moved, target=aims)


# keys and values -------------------------------------------------------------------------------------


def _move() -> Iterator[KernelCase]:
    """Yield rows of slots written in place and gathered."""

    def written(write: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(*given: Tensor) -> tuple[Tensor, Tensor]:
            write(*given)
            return given[0], given[1]

        return run

    def scatter_channels(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, index: Tensor) -> None:
        """Write by a list that names the slot of every channel."""
        for buffer, fresh in ((k, new_k), (v, new_v)):
            buffer.scatter_(2, index[:, None, :, None].expand_as(fresh), fresh)

    def gather_channels(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Gather by a list that names the slot of every channel, as presses of KVPress do."""
        return tuple(x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))

    scatter: Ways = {"kernel": move.SCATTER, "plain": move.scatter_twin, "by channels": scatter_channels}
    gather: Ways = {"kernel": move.GATHER, "plain": move.gather_twin, "by channels": gather_channels}
    deep = (1, 32768, 512, 64)
    # Heads, slots, channels of keys and of values, slots that are moved.
    moves: tuple[tuple[str, Ways, Mapping[str, tuple[int, ...]]], ...] = (
        (
            "kv_scatter",
            {name: written(way) for name, way in scatter.items()},
            {"LLaDA-8B": (32, 4096, 128, 128, 64), "DeepSeek-V3": (*deep, 64)},
        ),
        ("kv_gather", gather, {"Llama-3-8B": (8, 32768, 128, 128, 4096), "DeepSeek-V3": (*deep, 4096)}),
    )
    for operator, ways, sizes in moves:
        for model, size in sizes.items():

            def make(
                device: torch.device, tiny: bool, size: Any = size, writes: bool = ways is not gather
            ) -> tuple[Tensor, ...]:
                heads, slots, k_size, v_size, count = (2, 9, 16, 8, 4) if tiny else size
                kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
                k, v = (torch.randn(1, heads, slots, n, **kind) for n in (k_size, v_size))
                order = torch.rand(1 if writes else heads, slots, device=device).argsort(-1)
                index = order[:, :count].sort(-1).values
                if not writes:
                    return k, v, index[None]
                # Projections leave tokens before heads.
                new_k, new_v = (torch.randn(1, count, heads, n, **kind).transpose(1, 2) for n in (k_size, v_size))
                return k, v, new_k, new_v, index

            heads, slots, k_size, v_size, count = size
            shapes = f"{count} of [1, {heads}, {slots}, {k_size} and {v_size}] bfloat16"
            moved = 2 * 2 * heads * count * (k_size + v_size)
            yield KernelCase(operator, model, shapes, make, ways, moved, tolerance=0.0, target={"plain": 1.5})


HEADS, QUERIES, SLOTS, SIZE, GROUP = 8, 32, 32768, 128, 32  # of Llama-3.1-8B


def _quantize() -> Iterator[KernelCase]:
    """Yield rows of coding keys and values, and of attention to their codes, at the sizes of Llama-3.1-8B."""
    for bits in (2, 4, 8):
        for each, width in ((GROUP, 1), (1, GROUP)):
            yield from _coding(bits, each, width)
        yield _attending(bits)


def _half(device: torch.device, tiny: bool) -> Tensor:
    return torch.randn(1, HEADS, 64 if tiny else SLOTS, SIZE, device=device, dtype=torch.float16)


def _coded(x: Tensor, bits: int, each: int, width: int) -> tuple[Tensor, Tensor]:
    return quantize.quant_groups(x, bits, each, width, 2**bits - 1, False)


def _restored(run: Any, codes: Tensor, grid: Tensor, bits: int, each: int, width: int) -> Tensor:
    shape = (*codes.shape[:3], codes.shape[3] * 8 // bits)
    out = torch.empty(shape, dtype=torch.float16, device=codes.device)
    run(codes, grid, out, bits, each, width, 0.0, None)
    return out


def _coding(bits: int, each: int, width: int) -> Iterator[KernelCase]:
    """Yield the rows of quantizing and of restoring."""
    settings = bits, each, width, 2.0**bits - 1, False, torch.float16

    def quant(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize.quant_twin(x, *settings)

    def dequant(codes: Tensor, grid: Tensor) -> Tensor:
        return _restored(quantize.dequant_twin, codes, grid, bits, each, width)

    count, axis = HEADS * SLOTS * SIZE, "tokens" if width == 1 else "channels"
    about = "Llama-3.1-8B", f"[1, {HEADS}, {SLOTS}, {SIZE}], {bits} bits, {GROUP} {axis}"
    moved = 2 * count + count * bits // 8 + 4 * count // GROUP
    ways: Ways = {"kernel": lambda x: quantize.QUANT(x, *settings), "plain": quant, "torch.compile": compiled(quant)}
    made: Make = lambda device, tiny: (_half(device, tiny),)  # noqa: E731
    yield KernelCase("quant_groups", *about, made, ways, moved, target={"torch.compile": 2.0})
    ways = {
        "kernel": lambda codes, grid: _restored(quantize.DEQUANT, codes, grid, bits, each, width),
        "plain": dequant,
        "torch.compile": compiled(dequant),
    }
    made = lambda device, tiny: _coded(_half(device, tiny), bits, each, width)  # noqa: E731
    yield KernelCase("dequant_groups", *about, made, ways, moved, target={"limit": 0.75})


def _attending(bits: int) -> KernelCase:
    settings = SIZE**-0.5, bits, bits, GROUP, GROUP, 0.0, 0.0

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        k, v = _half(device, tiny), _half(device, tiny)
        q = torch.randn(1, QUERIES, SIZE, device=device, dtype=torch.float16)
        return q, *_coded(k, bits, GROUP, 1), *_coded(v, bits, 1, GROUP)

    def decoded(q: Tensor, k: Tensor, kg: Tensor, v: Tensor, vg: Tensor) -> Tensor:
        keys = _restored(quantize.dequant_twin, k, kg, bits, GROUP, 1)
        values = _restored(quantize.dequant_twin, v, vg, bits, 1, GROUP)
        rows = q.view(len(q), HEADS, -1, SIZE)
        return functional.scaled_dot_product_attention(rows, keys, values).flatten(1, 2)

    against = "decoded, then SDPA"
    ways: Ways = {
        "kernel": lambda q, k, kg, v, vg: coded.ATTEND(q, k, kg, v, vg, *settings)[0],
        "plain": lambda q, k, kg, v, vg: coded.attend_twin(q, k, kg, v, vg, *settings)[0],
        against: decoded,
        "torch.compile": compiled(decoded),
    }
    count, flops = 2 * HEADS * SLOTS * SIZE, 4 * QUERIES * SLOTS * SIZE
    about = "Llama-3.1-8B", f"{QUERIES}/{HEADS} heads, {SLOTS} slots of {bits} bits"
    moved = count * bits // 8 + 4 * count // GROUP
    return KernelCase("attn_decode_kivi", *about, make, ways, moved, flops, target={against: 5.0}, instead=against)


def _rotary() -> Iterator[KernelCase]:
    """Yield rows of rotations of keys."""

    def by_halves(x: Tensor, angles: Tensor) -> Tensor:
        """Rotate as language models of transformers do, with tables in the dtype of keys."""
        cos, sin = (torch.cat([table, table], -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def by_complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
        """Rotate as the published code of Wan does, in complex numbers of 128 bits."""
        turns = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    def by(run: Callable[..., Any], interleaved: bool) -> Callable[[Tensor, Tensor], Any]:
        return lambda x, angles: run(x, angles, 1.0, False, 0, interleaved)

    # Keys [B, H, S, D], whether adjacent channels are a pair, dtype of angles.
    for model, shape, interleaved, precise in (
        ("Llama-3-8B", (1, 8, 32768, 128), False, torch.float32),
        ("Llama-3-8B, one token", (1, 32, 1, 128), False, torch.float32),
        ("Wan2.1-1.3B", (1, 12, 32760, 128), True, torch.float64),
    ):

        def make(device: torch.device, tiny: bool, shape: Any = shape, precise: Any = precise) -> tuple[Tensor, ...]:
            batch, heads, slots, size = (1, 2, 9, 16) if tiny else shape
            x = torch.randn(batch, heads, slots, size, device=device, dtype=torch.bfloat16)
            return x, 100 * torch.randn(slots, size // 2, device=device, dtype=precise)

        plain = by(rotary.rotate_twin, interleaved)
        ways: Ways = {
            "kernel": by(rotary.ROTATE, interleaved),
            "plain": plain,
            "as published": by_complex_numbers if interleaved else by_halves,
            "torch.compile": compiled(plain),
        }
        shapes = f"{list(shape)} bfloat16, {'pairs' if interleaved else 'halves'}"
        moved = 4 * math.prod(shape) + math.prod(shape[2:]) // 2 * precise.itemsize
        target = {"plain": 3.0, "torch.compile": 1.0}
        yield KernelCase("rotate", model, shapes, make, ways, moved, target=target)


FAMILIES = (_attention, _codes, _distance, _forecast, products, _move, _quantize, _rotary, _rows)


def all_cases() -> list[KernelCase]:
    """Return the rows of all operators."""
    return [case for family in FAMILIES for case in family()]

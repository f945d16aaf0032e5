"""Launches of all kernels at sizes of real models: what the library launches on tensors without memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, bfloat16, float8_e4m3fn, float16, float32, float64, int8, int32, int64, uint8
from triton.runtime.jit import JITFunction, MockTensor

from diffcache.kernels.gpu import (
    attention,
    coded,
    codes,
    distance,
    forecast,
    linear,
    merge,
    move,
    quantize,
    rotary,
    rows,
)
from diffcache.kernels.rows import WIDEST

FEW, MANY, WHOLE = "HMMA", "HGMMA", "IGMMA"  # what multiplies matrices: 16 rows, 64, of integers
CODED_TEXTS = {8: coded.EIGHT, 4: coded.FOUR, 2: coded.TWO}
SLOTS, HEADS, QUERIES = 32768, 8, 32
CODED = ((4, 128, 128, bfloat16), (8, 32, 128, bfloat16), (2, 32, 128, float32))


@dataclass
class Launch:
    """One configuration of a kernel that is launched.

    Attributes:
        name: For the id of a test: of the call, and of the kernel where it is not the first.
        kernel: The kernel.
        args: Its arguments.
        options: Constants and settings of the launch.
        products: Which instruction multiplies matrices; none by default.
        wide: Whether loads have to be of 16 bytes or asynchronous.
        text: Pattern of what has to stand in the PTX.
    """

    name: str
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    products: str = ""
    wide: bool = True
    text: str = ""


def t(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


Call = tuple[str, Callable[[], Any], dict[str, Any]]  # and what holds of its first kernel


def attentions() -> Iterator[Call]:
    """Yield calls of attention to codes, of a few queries, of masses, and of merged parts."""
    for bits, group, size, dtype in CODED:
        # A thread of one warp takes `block * size / 16` codes in an iteration: 512 of 4 bits in
        # groups of 128, at 2.1 instructions each.
        held, shift = t(uint8, 1, HEADS, SLOTS, size * bits // 8), -(2**bits - 1) / 2
        grids = (t(float16, 1, HEADS, SLOTS // group, 2, size), t(float16, 1, HEADS, SLOTS, 2, size // group))
        given = t(dtype, 1, QUERIES, size), held, grids[0], held, grids[1]
        numbers = 0.088, bits, bits, group, group, shift, shift
        mask = str(CODED_TEXTS[bits].value).split(";")[2].split(",")[-1]  # of codes
        yield (
            f"attn_decode_kivi-{bits}-{group}-{size}-{dtype}",
            partial(coded.attn_decode_kivi, *given, *numbers),
            {"products": "" if dtype == float32 else FEW, "text": rf"and\.b32 .*,{mask};"},
        )
    yield from attended()
    for parts, size, dtype in ((2, 128, bfloat16), (8, 256, float32)):
        outs, logs = [t(dtype, 24, 4608, size)] * parts, [t(float32, 24, 4608)] * parts
        yield f"lse_merge-{parts}-{size}-{dtype}", partial(merge.lse_merge, outs, logs), {}


def attended() -> Iterator[Call]:
    """Yield calls of attention to slots as they are held, and of masses."""
    listed = {"slots": t(int32, 1, HEADS, SLOTS), "offset": 4096, "window": 1024, "sinks": 16}
    turned = {"turns": t(float32, 1, 1, SLOTS, 128), "interleaved": True}
    halves = {"turns": t(float32, 1, 1, SLOTS, 256)}
    hidden = {"mask": t(uint8, 1, 1, 1, SLOTS).view(torch.bool)}
    for name, dtype, size, count, form, seen in (
        ("dense", bfloat16, 128, 4680, (), {}),
        ("list", bfloat16, 128, 16, (), listed),
        ("list", float32, 128, 1, (), listed),
        ("turned", bfloat16, 128, 4680, (4, 32), turned),
        ("hidden", float16, 64, 4680, (2, 32), hidden),
        ("halves", bfloat16, 256, 4680, (8, 32), halves),
        ("bytes", bfloat16, 128, 4680, (8, 128), {"offset": 0}),
        ("alone", bfloat16, 128, 4608, (), {"offset": 0}),
    ):
        q = t(dtype, 1, QUERIES, count, size)
        k, key_grid, v, value_grid = t(dtype, 1, HEADS, SLOTS, size), None, q, None
        v = None if name == "alone" else k
        key_form: list[int] = []
        value_form: list[int] = []
        if form:
            bits, group = form
            kind = float8_e4m3fn if name == "bytes" else uint8
            k = v = t(kind, 1, HEADS, SLOTS, size * bits // 8)
            key_form, value_form = [bits, group, 1], [bits, 1, group]
            key_grid = t(float16, 1, HEADS, SLOTS // group, 2, size)
            value_grid = t(float16, 1, HEADS, SLOTS, 2, size // group)
            if name == "bytes":  # a scale a slot
                key_grid = value_grid = t(float16, 1, HEADS, SLOTS, 1, 1)
                key_form = value_form
        keys = k, key_grid, *(seen.get(one) for one in ("slots", "mask", "turns"))
        limits = (seen.get("interleaved", False), seen.get("offset"), seen.get("window", 0), seen.get("sinks", 0))
        products = "" if dtype == float32 else FEW if count == 1 else MANY
        yield (
            f"attn_forward-{name}-{dtype}-{size}-{count}",
            partial(attention.attn_forward, q, *keys, v, value_grid, 0.5, *limits, key_form, 0.0, value_form, 0.0),
            {"products": products},
        )
        if name in ("turned", "alone", "halves") or (name, dtype) == ("list", float32):
            yield (
                f"attn_mass-{name}-{dtype}-{size}-{count}",
                partial(attention.attn_mass, q, *keys, t(float32, *q.shape[:3]), 0.5, *limits, key_form, 0.0),
                {"products": products},
            )


def features() -> Iterator[Call]:
    """Yield calls on features and their codes: rounding, distances, forecasts, products, rows."""
    x = t(bfloat16, 4608, 15360)
    yield "int8_codes-15360", partial(codes.int8_codes, x, 4.0, 128, None, None, 8), {}
    x, each = t(float32, 3072, 64), (t(float32, 3072, 1), t(int32, 3072, 1))
    yield "int8_codes-rows-64", partial(codes.int8_codes, x, 1.0, 0, *each, 8), {}
    for name, kind, size in (("bfloat16", bfloat16, 3072), ("short", bfloat16, 64)):
        x = t(kind, 4608, size)
        yield f"l1_sums-{name}", partial(distance.l1_sums, x, x), {}
    x, weights = t(bfloat16, 4608, 3072), [1.0, 3.0, 4.5, 4.5, 3.0]
    for count, extra in ((3, False), (5, True)):
        given = [x] * count, weights[:count], *[x if extra else None] * 2
        yield f"weighted_sum-{count}-{extra}", partial(forecast.weighted_sum, *given), {}
    given = x, [x] * 4, [x] * 4, [5.0] * 4
    yield "finite_differences-4", partial(forecast.finite_differences, *given), {}
    for height in (4608, 64, 16):
        terms, factor = t(int32, 12288), t(float32, 12288)
        given = t(int8, height, 3072), t(int8, 12288, 3072), terms, 9, factor, factor, bfloat16
        by = {"products": WHOLE if height >= 64 else ""}
        yield f"linear_of_codes-{height}", partial(linear.linear_of_codes, *given), by
    for width in (64, WIDEST):
        yield f"pack_rows-{width}", partial(rows.pack_rows, t(bfloat16, 4608, width)), {}
    for count, base, width in ((5, True, 3072), (3, True, 64)):
        held, scale = [t(int8, 4608, width)] * count, [t(bfloat16, 4608, 1)] * count
        given = held, scale, weights[:count], t(bfloat16, 4608, width) if base else None, bfloat16
        yield (f"weighted_sum_int8-{count}-{base}-{width}", partial(rows.weighted_sum_int8, *given), {})


def slots() -> Iterator[Call]:
    """Yield calls that move slots, rotate them, and code and restore them."""
    for heads, k, v in ((8, 128, 128), (1, 512, 64)):
        held = [t(bfloat16, 1, heads, SLOTS, n) for n in (k, v)]
        fresh = [t(bfloat16, 1, 64, heads, n).transpose(1, 2) for n in (k, v)]
        at, kept = t(int64, 1, 64), t(int64, 1, heads, 4096)
        yield f"kv_scatter-{k}-{v}", partial(move.kv_scatter, *held, *fresh, at), {}
        yield f"kv_gather-{k}-{v}", partial(move.kv_gather, *held, kept), {}
    for name, precise, heads, count, channels, start, pairs, interleaved in (
        ("half", float32, 8, 32768, 128, 0, 64, False),
        ("interleaved", float64, 12, 32760, 128, 0, 64, True),
        ("latent", float32, 1, 4096, 576, 512, 32, True),
    ):
        x = t(bfloat16, 1, count, heads, channels).transpose(1, 2)
        given = x, t(precise, 1, 1, count, pairs), 1.0, False, start, interleaved
        yield f"rotate-{name}", partial(rotary.rotate, *given), {}
    x = t(bfloat16, 1, HEADS, SLOTS, 128)
    for way, bits, each, width in (("tokens", 2, 32, 1), ("channels", 4, 1, 128)):
        numbers = bits, each, width, 2.0**bits - 1, False, float16
        yield (f"quant_groups-{way}-{bits}", partial(quantize.quant_groups, x, *numbers), {})
    for way, bits, each, width in (("tokens", 4, 128, 1), ("channels", 2, 1, 32)):
        held = t(uint8, 1, HEADS, SLOTS, 16 * bits)
        grid = t(float16, 1, HEADS, SLOTS // each, 2, 128 // width)
        yield (
            f"dequant_groups-{way}-{bits}",
            partial(quantize.dequant_groups, held, grid, x, bits, each, width, 0.0, None),
            {"wide": width == 1},
        )


def launches() -> Iterator[Launch]:
    """Yield every launch of the calls, one that was there before not again."""
    noted: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    seen = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        noted.append((kernel, args, options))

    for name, call, expected in (*attentions(), *features(), *slots()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", note)
            call()
        for number, (kernel, args, options) in enumerate(noted):
            mocks = tuple(MockTensor(a.dtype) if isinstance(a, Tensor) else a for a in args)
            key = kernel, tuple(str(getattr(a, "dtype", a)) for a in mocks), str(options)
            if key not in seen:
                seen.add(key)
                if number:
                    expected = {"wide": "total" not in kernel.__name__}
                one = f"{name}:{kernel.__name__}" if number else name
                yield Launch(one, kernel, mocks, options, **expected)
        noted.clear()


LAUNCHES = list(launches())

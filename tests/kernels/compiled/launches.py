"""Configurations of all kernels, as their launches make them at sizes of real models."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import (
    coded,
    codes,
    decode,
    distance,
    forecast,
    linear,
    mass,
    merge,
    move,
    quantize,
    rotary,
    rows,
)
from diffcache.kernels.rows import WIDEST
from tests.kernels.compiled.machine import Launch

HALF, WIDE, GRID = (MockTensor(kind) for kind in (torch.bfloat16, torch.float32, torch.float16))
BYTES, CODES, UNITS, WHOLE, LONG = (
    MockTensor(kind) for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)

CODED_PAIRS, CODED_GROUPS, CODED_SLOTS, CODED_SIZE = 8, 4, 32768, 128
CODED_TEXTS = {8: coded.EIGHT, 4: coded.FOUR, 2: coded.TWO}


def coded_launches() -> list[Launch]:
    """Return configurations of the kernels that attend to coded keys and values.

    A thread of one warp takes `block * size / 16` codes in an iteration: 512 of 4 bits in groups
    of 128, at 2.1 instructions each.
    """
    found = []
    for bits, group, size, dtype in (
        (4, 128, 128, torch.bfloat16), (2, 32, 128, torch.bfloat16),
        (8, 32, 128, torch.bfloat16), (4, 64, 256, torch.float16),
        (2, 32, 128, torch.float32),
    ):  # fmt: skip
        block = coded.block_of(group, size * bits // 8, dtype)
        _, chunk = coded.split(CODED_SLOTS, CODED_PAIRS, block)
        shift = -(2**bits - 1) / 2
        text = str(CODED_TEXTS[bits].value).split(";")[2].split(",")[-1]  # a mask of codes
        found.append(
            Launch(
                f"attn_decode_kivi-{bits}-{group}-{size}-{dtype}", coded.part_kernel,
                (WIDE, WIDE, MockTensor(dtype), UNITS, GRID, UNITS, GRID, 0.088, CODED_SLOTS, CODED_SLOTS,
                 chunk, shift, shift),
                {"EACH": group, "COLUMNS": size // group, "GROUPS": CODED_GROUPS, "QUERIES": CODED_GROUPS,
                 "SIZE": size, "WIDE": size, "KEY_BITS": bits, "VALUE_BITS": bits, "KEY_PARTS": 2,
                 "VALUE_PARTS": 2, "WORK": coded.work(dtype), "BLOCK": block, "ASM": True,
                 "num_warps": coded.warps_of(size // group * CODED_GROUPS * size, dtype)},
                products={} if dtype == torch.float32 else {80: "HMMA", 90: "HMMA"},
                text=rf"and\.b32 .*,{text};",
            )
        )  # fmt: skip
    merged = {"GROUPS": CODED_GROUPS, "WIDE": CODED_SIZE, "PARTS": coded.MOST_PARTS, "num_warps": 8}
    found.append(
        Launch("attn_decode_kivi-merge", coded.merge_kernel, (WIDE, WIDE, WIDE, WIDE, 64), merged)
    )
    return found


def codes_launches() -> list[Launch]:
    """Return configurations of the kernel that rounds to codes."""
    found = [
        Launch(f"int8_codes-{width}", codes.codes_kernel,
               (CODES, HALF, HALF, HALF, 4608 * width, codes.COLUMNS, 0.25, 128.0),
               {"BITS": 8, "PER_ROW": False} | codes.tile(codes.COLUMNS))
        for width in (3072, 15360)
    ]  # fmt: skip
    return found + [
        Launch(f"int8_codes-rows-{width}", codes.codes_kernel,
               (CODES, WIDE, WIDE, MockTensor(torch.int32), 3072 * width, width, 1.0, 0.0),
               {"BITS": 8, "PER_ROW": True} | codes.tile(width))
        for width in (64, 3072)
    ]  # fmt: skip


DECODE_FEW = {80: "HMMA", 90: "HMMA", 100: "HMMA"}  # 16 rows
DECODE_MANY = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # 64 rows


def decode_launches() -> list[Launch]:
    """Return configurations of the kernels of attention of a few queries."""
    log, number = MockTensor(torch.float32), MockTensor(torch.int32)
    found = []
    for dtype, size, groups, count, extra in (
        (torch.bfloat16, 128, 4, 1, False), (torch.bfloat16, 128, 4, 16, True),
        (torch.float32, 128, 4, 1, True),
    ):  # fmt: skip
        data = MockTensor(dtype)
        row = 32768 * size
        numbers = 0.5, *[8 * row, row, size] * 3, 8 * 4096, 4096, 8, count, 32768, 40960, 4096, 1024
        options = dict.fromkeys(("SLOTS", "CAUSAL", "WINDOW"), extra) | {
            "GROUPS": groups, "SIZE": size, "WIDTH": size, "VSIZE": size, "VWIDTH": size,
            **decode.tiles(dtype, size, groups * count),
        }  # fmt: skip
        found.append(
            Launch(
                f"attn_decode-{dtype}-{size}-{count}-{extra}", decode.decode_kernel,
                (log, log, data, data, data, number, *numbers), options,
                {} if dtype == torch.float32 else DECODE_FEW if groups * count <= 16 else DECODE_MANY,
            )
        )  # fmt: skip
    found.append(
        Launch(
            "combine-64-256", decode.combine_kernel,
            (MockTensor(torch.bfloat16), log, log, log, 32, decode.SHARES),
            {"SHARES": decode.SHARES, "SIZE": 256, "WIDTH": 256, "num_warps": 4},
        )
    )  # fmt: skip
    return found


def distance_launches() -> list[Launch]:
    """Return configurations of the kernels of distances."""
    return [
        Launch(f"l1_sums-{name}", distance.parts_kernel,
               (WIDE, given, given, size, blocks, parts), distance.DEFAULT)
        for name, given, size, blocks, parts in (
            ("bfloat16", HALF, 4608 * 3072, 7, 988), ("float32", WIDE, 4608 * 3072, 7, 988),
            ("short", HALF, 4608 * 64, 1, 144),
        )
    ] + [
        Launch("l1_sums-total", distance.total_kernel, (WIDE, WIDE, 988),
               {"MOST": distance.MOST, "num_warps": distance.WARPS}, wide=False)
    ]  # fmt: skip


def forecast_launches() -> list[Launch]:
    """Return configurations of the kernels of forecasts."""
    size = 4608 * 3072
    found = [
        Launch(
            f"weighted_sum-{count}-{extra}", forecast.sum_kernel,
            (*[HALF] * 8, size, 1.0, 3.0, 4.5, 4.5, 3.0),
            {"COUNT": count, "BASE": extra, "GATE": extra, **forecast.DEFAULT},
        )
        for count, extra in ((1, True), (3, False), (3, True), (5, True))
    ]  # fmt: skip
    found += [
        Launch(
            f"finite_differences-{count}", forecast.differences_kernel,
            (*[HALF] * 9, size, 0.2, 0.2, 0.2, 0.2), {"COUNT": count, **forecast.DEFAULT},
        )
        for count in (1, 2, 4)
    ]  # fmt: skip
    return found


def linear_launches() -> list[Launch]:
    """Return configurations of the kernel of products of codes."""
    return [
        Launch(
            f"linear_of_codes-{height}", linear.linear_kernel,
            (HALF, CODES, CODES, WHOLE, WHOLE, WIDE, WIDE, height, 12288, 3072, 9),
            linear.tile(height),
            products={80: "IMMA", 90: "IGMMA", 100: "UTC"} if height >= 64 else {},
        )
        for height in (4608, 64, 16)
    ]  # fmt: skip


MASS_PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def mass_launches() -> list[Launch]:
    """Return configurations of the kernels of log-sum-exps and of masses of attention."""
    log = MockTensor(torch.float32)
    found = []
    for dtype, size, groups, causal in (
        (torch.bfloat16, 128, 1, False), (torch.bfloat16, 128, 4, True),
        (torch.bfloat16, 256, 2, True), (torch.float32, 128, 4, True),
    ):  # fmt: skip
        data = MockTensor(dtype)
        row = 4608 * size
        numbers = 0.5, 3, 8 * row, row, size, 8 * row, row, size, 8, 4608, 4608
        options = {
            "CAUSAL": causal, "GROUPS": groups, "SIZE": size, "WIDTH": size,
            **mass.tiles(dtype, size),
        }  # fmt: skip
        products = {} if dtype == torch.float32 else MASS_PRODUCTS
        name = f"{dtype}-{size}-{groups}-{causal}"
        found += [
            Launch(f"attn_lse-{name}", mass.lse_kernel, (log, data, data, *numbers), options,
                   products),
            Launch(f"attn_mass-{name}", mass.mass_kernel, (log, data, data, log, *numbers), options,
                   products),
        ]  # fmt: skip
    return found


def merge_launches() -> list[Launch]:
    """Return configurations of the kernel that merges parts of attention."""
    wide = MockTensor(torch.float32)
    found = []
    for parts, size, dtype in (
        (2, 128, torch.bfloat16), (2, 128, torch.float32), (3, 64, torch.float32),
        (8, 128, torch.float32), (8, 256, torch.float32),
    ):  # fmt: skip
        rows = merge.BLOCK // size
        found.append(
            Launch(
                f"lse_merge-{parts}-{size}-{dtype}", merge.merge_kernel,
                (wide, wide, *[MockTensor(dtype)] * 8, *[wide] * 8, 24 * 4608),
                {"PARTS": parts, "SIZE": size, "ROWS": rows, "WIDTH": size,
                 "num_warps": merge.WARPS},
            )
        )  # fmt: skip
    return found


MOVE_SLOTS = 32768


def move_launches() -> list[Launch]:
    """Return configurations of the kernels that move slots."""
    found = []
    for heads, k, v in ((8, 128, 128), (1, 512, 64), (8, 192, 128)):
        steps = [(heads * MOVE_SLOTS * n, MOVE_SLOTS * n, n) for n in (k, v)]
        fresh = [(heads * 64 * n, n, heads * n) for n in (k, v)]
        options = move.sizes(k, v)
        found.append(
            Launch(
                f"kv_scatter-{k}-{v}", move.scatter_kernel,
                (*[HALF] * 4, LONG, 64, MOVE_SLOTS, k, v, *steps[0], *steps[1], *fresh[0], *fresh[1], 64),
                options,
            )
        )  # fmt: skip
        found.append(
            Launch(
                f"kv_gather-{k}-{v}", move.gather_kernel,
                (*[HALF] * 4, LONG, 4096, MOVE_SLOTS, heads, k, v, *steps[0], *steps[1], heads * 4096,
                 4096),
                options,
            )
        )  # fmt: skip
    return found


QUANTIZE_HEADS, QUANTIZE_SLOTS, QUANTIZE_SIZE = 8, 32768, 128
QUANTIZE_STRIDES = (
    QUANTIZE_HEADS * QUANTIZE_SLOTS * QUANTIZE_SIZE,
    QUANTIZE_SLOTS * QUANTIZE_SIZE,
    QUANTIZE_SIZE,
)


def quantize_launches() -> list[Launch]:
    """Return configurations of the kernels that code numbers and take them back."""
    found = []
    for bits, group in ((2, 32), (4, 128)):
        room, top = QUANTIZE_SIZE * bits // 8, 2.0**bits - 1
        numbers = *QUANTIZE_STRIDES, top, -top / 2, 65504.0, top
        form = quantize.tokens_default(group, QUANTIZE_SIZE)
        block = quantize.tokens_block(group, QUANTIZE_SIZE, form["TILE"])
        found.append(
            Launch(
                f"quant_groups-tokens-{bits}", quantize.tokens_kernel,
                (HALF, BYTES, GRID, QUANTIZE_HEADS, QUANTIZE_SLOTS, QUANTIZE_SIZE, group, room, *numbers),
                {"SYMMETRIC": False, "BITS": bits, **block, "num_warps": form["num_warps"]},
            )
        )  # fmt: skip
        tile, warps = quantize.DEFAULT.values()
        block = quantize.channels_block(group, bits, tile)
        found.append(
            Launch(
                f"quant_groups-channels-{bits}", quantize.channels_kernel,
                (HALF, BYTES, GRID, QUANTIZE_HEADS, QUANTIZE_SLOTS, QUANTIZE_SIZE, group, QUANTIZE_SIZE // group, room,
                 *numbers),
                {"SYMMETRIC": False, "BITS": bits, **block, "num_warps": warps},
            )
        )  # fmt: skip
        for each, width in ((group, 1), (1, group)):
            rows, columns = (
                QUANTIZE_SLOTS // each,
                QUANTIZE_SIZE if width == 1 else QUANTIZE_SIZE // width,
            )
            found.append(
                Launch(
                    f"dequant_groups-{'tokens' if width == 1 else 'channels'}-{bits}",
                    quantize.restore_kernel,
                    (BYTES, GRID, BYTES, HALF, QUANTIZE_HEADS, QUANTIZE_SLOTS, QUANTIZE_SIZE, rows, each,
                     width, columns, room, *QUANTIZE_STRIDES, 0.0),
                    {"LISTED": False, "SYMMETRIC": False, "TOKENS": width == 1, "BITS": bits,
                     **quantize.restore_block(room, bits, tile), "num_warps": warps},
                    wide=width == 1,
                )
            )  # fmt: skip
    return found


ROTARY_SHAPES = (
    ("half", torch.float32, 8, 32768, 128, 0, 64, False),
    ("interleaved", torch.float64, 12, 32760, 128, 0, 64, True),
    ("some channels", torch.float32, 32, 4096, 128, 0, 32, False),
    ("latent", torch.float32, 1, 4096, 576, 512, 32, True),
)


def rotary_launches() -> list[Launch]:
    """Return configurations of the kernel that rotates."""
    found = []
    for name, precise, heads, slots, channels, start, pairs, interleaved in ROTARY_SHAPES:
        width = 1 << (pairs - 1).bit_length()
        rest = channels - 2 * pairs
        half = MockTensor(torch.bfloat16)
        steps = heads * slots * channels, channels, heads * channels, 0, 0, pairs
        found.append(
            Launch(
                f"rotate-{name}", rotary.rotate_kernel,
                (half, half, MockTensor(precise), heads, heads, slots, channels, start, pairs,
                 *steps, 1.0, 1.0),
                {"ROWS": rotary.DEFAULT["TILE"] // width, "PAIRS": width,
                 "REST": 1 << (rest - 1).bit_length() if rest else 0, "INTERLEAVED": interleaved,
                 "num_warps": rotary.DEFAULT["num_warps"]},
            )
        )  # fmt: skip
    return found


ROWS_FIXED = {"ROOM": rows.ROOM, "LARGEST": rows.LARGEST, "LEAST": rows.LEAST}


def rows_launches() -> list[Launch]:
    """Return configurations of the kernels of rows of codes."""
    found = [
        Launch(f"pack_rows-{width}", rows.pack_kernel, (CODES, HALF, HALF, 4608, width),
               ROWS_FIXED | rows.pack_tile(width))
        for width in (64, 1536, 3072, 5120, WIDEST)
    ]  # fmt: skip
    return found + [
        Launch(
            f"weighted_sum_int8-{count}-{base}-{width}", rows.sum_kernel,
            (HALF, *[CODES] * 5, *[HALF] * 6, 4608, width, 1.0, 3.0, 4.5, 4.5, 3.0),
            {"COUNT": count, "BASE": base} | rows.sum_tile(width),
        )
        for count, base, width in (
            (1, False, 3072), (3, False, 3072), (3, True, 1536), (5, True, 3072), (3, True, 64)
        )
    ]  # fmt: skip


LAUNCHES = [
    *coded_launches(),
    *codes_launches(),
    *decode_launches(),
    *distance_launches(),
    *forecast_launches(),
    *linear_launches(),
    *mass_launches(),
    *merge_launches(),
    *move_launches(),
    *quantize_launches(),
    *rotary_launches(),
    *rows_launches(),
]

"""Configurations of the kernels that code numbers and take them back."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import quantize
from tests.kernels.compiled.machine import Launch

HALF, GRID, BYTES = (MockTensor(kind) for kind in (torch.bfloat16, torch.float16, torch.uint8))
HEADS, SLOTS, SIZE = 8, 32768, 128
STRIDES = HEADS * SLOTS * SIZE, SLOTS * SIZE, SIZE


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    found = []
    for bits, group in ((2, 32), (4, 128)):
        room, top = SIZE * bits // 8, 2.0**bits - 1
        numbers = *STRIDES, top, -top / 2, 65504.0, top
        form = quantize.tokens_default(group, SIZE)
        block = quantize.tokens_block(group, SIZE, form["TILE"])
        found.append(
            Launch(
                f"quant_groups-tokens-{bits}", quantize.tokens_kernel,
                (HALF, BYTES, GRID, HEADS, SLOTS, SIZE, group, room, *numbers),
                {"SYMMETRIC": False, "BITS": bits, **block, "num_warps": form["num_warps"]},
            )
        )  # fmt: skip
        tile, warps = quantize.DEFAULT.values()
        block = quantize.channels_block(group, bits, tile)
        found.append(
            Launch(
                f"quant_groups-channels-{bits}", quantize.channels_kernel,
                (HALF, BYTES, GRID, HEADS, SLOTS, SIZE, group, SIZE // group, room,
                 *numbers),
                {"SYMMETRIC": False, "BITS": bits, **block, "num_warps": warps},
            )
        )  # fmt: skip
        for each, width in ((group, 1), (1, group)):
            rows, columns = SLOTS // each, SIZE if width == 1 else SIZE // width
            found.append(
                Launch(
                    f"dequant_groups-{'tokens' if width == 1 else 'channels'}-{bits}",
                    quantize.restore_kernel,
                    (BYTES, GRID, BYTES, HALF, HEADS, SLOTS, SIZE, rows, each,
                     width, columns, room, *STRIDES, 0.0),
                    {"LISTED": False, "SYMMETRIC": False, "TOKENS": width == 1, "BITS": bits,
                     **quantize.restore_block(room, bits, tile), "num_warps": warps},
                    wide=width == 1,
                )
            )  # fmt: skip
    return found

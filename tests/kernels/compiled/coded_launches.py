"""Configurations of the kernels that attend to coded keys and values."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import coded
from tests.kernels.compiled.machine import Launch

GRID, BYTES, WIDE = (MockTensor(kind) for kind in (torch.float16, torch.uint8, torch.float32))
PAIRS, GROUPS, SLOTS, SIZE = 8, 4, 32768, 128


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    found = []
    for bits, group, size, dtype, loop in (
        (2, 32, 128, torch.bfloat16, 740), (4, 128, 128, torch.bfloat16, 2000),
        (4, 64, 256, torch.float16, 2200), (2, 32, 128, torch.float32, 1130),
    ):  # fmt: skip
        block = coded.block_of(group, size, dtype)
        _, chunk = coded.split(SLOTS, PAIRS, block)
        shift = -(2**bits - 1) / 2
        found.append(
            Launch(
                f"attn_decode_kivi-{bits}-{group}-{size}-{dtype}", coded.part_kernel,
                (WIDE, WIDE, MockTensor(dtype), BYTES, GRID, BYTES, GRID, 0.088, SLOTS, SLOTS,
                 group, chunk, shift, shift),
                {"COLUMNS": size // group, "GROUPS": GROUPS, "SIZE": size, "WIDE": size, "KEY_BITS": bits,
                 "VALUE_BITS": bits, "KEY_PARTS": 2, "VALUE_PARTS": 2, "WORK": coded.work(dtype),
                 "ROWS": coded.ROWS, "BLOCK": block, "num_warps": coded.WARPS},
                products={} if dtype == torch.float32 else {80: "HMMA", 90: "HMMA"}, loop=loop,
            )
        )  # fmt: skip
    merged = {"GROUPS": GROUPS, "WIDE": SIZE, "PARTS": 64, "num_warps": coded.WARPS}
    found.append(
        Launch("attn_decode_kivi-merge", coded.merge_kernel, (WIDE, WIDE, WIDE, WIDE, 64), merged)
    )
    return found

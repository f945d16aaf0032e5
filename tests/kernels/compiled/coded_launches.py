"""Configurations of the kernels that attend to coded keys and values."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import coded
from tests.kernels.compiled.machine import Launch

GRID, UNITS, WIDE = (MockTensor(kind) for kind in (torch.float16, torch.int16, torch.float32))
PAIRS, GROUPS, SLOTS, SIZE = 8, 4, 32768, 128
TEXTS = {8: coded.EIGHT, 4: coded.FOUR, 2: coded.TWO}


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models.

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
        _, chunk = coded.split(SLOTS, PAIRS, block)
        shift = -(2**bits - 1) / 2
        text = str(TEXTS[bits].value).split(";")[2].split(",")[-1]  # a mask of codes
        found.append(
            Launch(
                f"attn_decode_kivi-{bits}-{group}-{size}-{dtype}", coded.part_kernel,
                (WIDE, WIDE, MockTensor(dtype), UNITS, GRID, UNITS, GRID, 0.088, SLOTS, SLOTS,
                 chunk, shift, shift),
                {"EACH": group, "COLUMNS": size // group, "GROUPS": GROUPS, "QUERIES": GROUPS,
                 "SIZE": size, "WIDE": size, "KEY_BITS": bits, "VALUE_BITS": bits, "KEY_PARTS": 2,
                 "VALUE_PARTS": 2, "WORK": coded.work(dtype), "BLOCK": block, "ASM": True,
                 "num_warps": coded.warps_of(size // group * GROUPS * size, dtype)},
                products={} if dtype == torch.float32 else {80: "HMMA", 90: "HMMA"},
                text=rf"and\.b32 .*,{text};",
            )
        )  # fmt: skip
    merged = {"GROUPS": GROUPS, "WIDE": SIZE, "PARTS": coded.MOST_PARTS, "num_warps": 8}
    found.append(
        Launch("attn_decode_kivi-merge", coded.merge_kernel, (WIDE, WIDE, WIDE, WIDE, 64), merged)
    )
    return found

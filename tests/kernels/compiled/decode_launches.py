"""Configurations of the kernels of attention of a few queries."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import decode
from tests.kernels.compiled.machine import Launch

FEW = {80: "HMMA", 90: "HMMA", 100: "HMMA"}  # 16 rows
MANY = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # 64 rows


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
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
                {} if dtype == torch.float32 else FEW if groups * count <= 16 else MANY,
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

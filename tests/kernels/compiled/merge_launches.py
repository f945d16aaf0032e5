"""Configurations of the kernel that merges parts of attention."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import merge
from tests.kernels.compiled.machine import Launch


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
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

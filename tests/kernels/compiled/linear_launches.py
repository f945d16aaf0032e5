"""Configurations of the kernel of products of codes."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import linear
from tests.kernels.compiled.machine import Launch

HALF, CODES, WHOLE, WIDE = (
    MockTensor(dtype) for dtype in (torch.bfloat16, torch.int8, torch.int32, torch.float32)
)


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    return [
        Launch(
            f"linear_of_codes-{height}", linear.linear_kernel,
            (HALF, CODES, CODES, WHOLE, WHOLE, WIDE, WIDE, height, 12288, 3072, 9),
            linear.tile(height),
            products={80: "IMMA", 90: "IGMMA", 100: "UTC"} if height >= 64 else {},
        )
        for height in (4608, 64, 16)
    ]  # fmt: skip

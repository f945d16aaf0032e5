"""Configurations of the kernel that rounds to codes."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import codes
from tests.kernels.compiled.machine import Launch

HALF, WIDE, CODES = (MockTensor(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int8))


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
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

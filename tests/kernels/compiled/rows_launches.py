"""Configurations of the kernels of rows of codes."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import rows
from diffcache.kernels.rows import WIDEST
from tests.kernels.compiled.machine import Launch

HALF, CODES = MockTensor(torch.bfloat16), MockTensor(torch.int8)
FIXED = {"ROOM": rows.ROOM, "LARGEST": rows.LARGEST, "LEAST": rows.LEAST}


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    found = [
        Launch(f"pack_rows-{width}", rows.pack_kernel, (CODES, HALF, HALF, 4608, width),
               FIXED | rows.pack_tile(width))
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

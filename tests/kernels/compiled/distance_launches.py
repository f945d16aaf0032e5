"""Configurations of the kernels of distances."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import distance
from tests.kernels.compiled.machine import Launch

HALF, WIDE = MockTensor(torch.bfloat16), MockTensor(torch.float32)


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
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

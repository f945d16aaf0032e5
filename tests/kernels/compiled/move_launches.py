"""Configurations of the kernels that move slots."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import move
from tests.kernels.compiled.machine import Launch

HALF, LONG = MockTensor(torch.bfloat16), MockTensor(torch.int64)
SLOTS = 32768


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    found = []
    for heads, k, v in ((8, 128, 128), (1, 512, 64), (8, 192, 128)):
        steps = [(heads * SLOTS * n, SLOTS * n, n) for n in (k, v)]
        fresh = [(heads * 64 * n, n, heads * n) for n in (k, v)]
        options = move.sizes(k, v)
        found.append(
            Launch(
                f"kv_scatter-{k}-{v}", move.scatter_kernel,
                (*[HALF] * 4, LONG, 64, SLOTS, k, v, *steps[0], *steps[1], *fresh[0], *fresh[1], 64),
                options,
            )
        )  # fmt: skip
        found.append(
            Launch(
                f"kv_gather-{k}-{v}", move.gather_kernel,
                (*[HALF] * 4, LONG, 4096, SLOTS, heads, k, v, *steps[0], *steps[1], heads * 4096,
                 4096),
                options,
            )
        )  # fmt: skip
    return found

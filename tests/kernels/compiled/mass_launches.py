"""Configurations of the kernels of log-sum-exps and of masses of attention."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import mass
from tests.kernels.compiled.machine import Launch

PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def launches() -> list[Launch]:
    """Return every configuration, as the launches make them at sizes of real models."""
    log = MockTensor(torch.float32)
    found = []
    for dtype, size, groups, causal in (
        (torch.bfloat16, 128, 1, False), (torch.bfloat16, 128, 4, True),
        (torch.bfloat16, 256, 2, True), (torch.float32, 128, 4, True),
    ):  # fmt: skip
        data = MockTensor(dtype)
        row = 4608 * size
        numbers = 0.5, 3, 8 * row, row, size, 8 * row, row, size, 8, 4608, 4608
        options = {
            "CAUSAL": causal, "GROUPS": groups, "SIZE": size, "WIDTH": size,
            **mass.tiles(dtype, size),
        }  # fmt: skip
        products = {} if dtype == torch.float32 else PRODUCTS
        name = f"{dtype}-{size}-{groups}-{causal}"
        found += [
            Launch(f"attn_lse-{name}", mass.lse_kernel, (log, data, data, *numbers), options,
                   products),
            Launch(f"attn_mass-{name}", mass.mass_kernel, (log, data, data, log, *numbers), options,
                   products),
        ]  # fmt: skip
    return found

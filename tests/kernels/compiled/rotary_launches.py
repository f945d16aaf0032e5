"""Configurations of the kernel of rotations."""

from __future__ import annotations

import torch
from triton.runtime.jit import MockTensor

from diffcache.kernels.gpu import rotary
from tests.kernels.compiled.machine import Launch

# Name, dtype of angles, heads, slots, channels, start, pairs, interleaved.
SHAPES = (
    ("half", torch.float32, 8, 32768, 128, 0, 64, False),
    ("interleaved", torch.float64, 12, 32760, 128, 0, 64, True),
    ("some channels", torch.float32, 32, 4096, 128, 0, 32, False),
    ("latent", torch.float32, 1, 4096, 576, 512, 32, True),
)


def launches() -> list[Launch]:
    """Return every configuration, as the launch makes them at sizes of real models."""
    found = []
    for name, precise, heads, slots, channels, start, pairs, interleaved in SHAPES:
        width = 1 << (pairs - 1).bit_length()
        rest = channels - 2 * pairs
        half = MockTensor(torch.bfloat16)
        steps = heads * slots * channels, channels, heads * channels, 0, 0, pairs
        found.append(
            Launch(
                f"rotate-{name}", rotary.rotate_kernel,
                (half, half, MockTensor(precise), heads, heads, slots, channels, start, pairs,
                 *steps, 1.0, 1.0),
                {"ROWS": rotary.DEFAULT["TILE"] // width, "PAIRS": width,
                 "REST": 1 << (rest - 1).bit_length() if rest else 0, "INTERLEAVED": interleaved,
                 "num_warps": rotary.DEFAULT["num_warps"]},
            )
        )  # fmt: skip
    return found

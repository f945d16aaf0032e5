"""A film of a moving square, and the same with planted faults.

Tests cannot import one another, so each function is handed out by a fixture of its name.
"""

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.nn import functional

FRAMES = 13


def texture(height: int, width: int, seed: int, blur: float = 3.0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((height, width, 3)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), blur)
    return 120 + 40 * smooth / smooth.std()


def moving_square(step: float = 1.5, seed: int = 0, side: int = 64) -> torch.Tensor:
    """A textured square of 20 px that moves by `step` px a frame over a still background."""
    ground, square = texture(side, side, seed), texture(20, 20, seed + 1, 1.5)
    square[..., 0] += 60
    frames = []
    for time in range(FRAMES):
        shift = np.array([[1, 0, 8 + step * time], [0, 1, 22 + step * time / 3]], np.float32)
        cover = cv2.warpAffine(np.ones((20, 20), np.float32), shift, (side, side))[..., None]
        drawn = cv2.warpAffine(square, shift, (side, side))
        frames.append(ground * (1 - cover) + drawn)
    film = np.clip(np.round(np.stack(frames)), 0, 255).astype(np.uint8)
    return torch.from_numpy(film).permute(0, 3, 1, 2).contiguous()


def as_bytes(film: torch.Tensor) -> torch.Tensor:
    return film.round().clamp(0, 255).to(torch.uint8)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def faults() -> dict[str, torch.Tensor]:
    film = moving_square()
    real = film.float()
    order = torch.randperm(FRAMES, generator=torch.Generator().manual_seed(2))
    patches = normal(FRAMES, 1, 16, 16).repeat_interleave(4, 2).repeat_interleave(4, 3)
    padded = functional.pad(real, (2, 2, 2, 2), mode="replicate")
    time = torch.arange(FRAMES)
    return {
        "clean": film,
        "static": film[:1].repeat(FRAMES, 1, 1, 1),
        "flicker": as_bytes(real + 3 * normal(FRAMES, 1, 1, 1)),
        "noise": as_bytes(real + 3 * normal(*film.shape)),
        "patches": as_bytes(real + 8 * patches),
        "shuffled": film[order],
        "stutter": film[time // 2 * 2],
        "frozen": film[time.clamp(max=FRAMES // 2)],
        "blurred": as_bytes(functional.avg_pool2d(padded, 5, 1)),
        "swapped": torch.cat([film[: FRAMES // 2], moving_square(seed=9)[FRAMES // 2 :]]),
    }


@pytest.fixture(name="moving_square")
def give_moving_square() -> Any:
    return moving_square


@pytest.fixture(name="faults", scope="session")
def give_faults() -> Any:
    return faults

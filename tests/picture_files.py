"""Noise, pictures of noise, and files of them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def noise(height: int = 12, width: int = 16, seed: int = 0) -> Tensor:
    """Return a picture, uint8 [3, height, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal noise, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def save(file: Path, picture: Tensor, **options: object) -> Path:
    """Write a picture; the options are Pillow's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, **options)
    return file


def save_npz(file: Path, pictures: Tensor) -> Path:
    """Write pictures, uint8 [N, 3, H, W], as the ADM evaluator reads them."""
    np.savez(file, pictures.permute(0, 2, 3, 1).contiguous().numpy())
    return file


def filled(folder: Path, names: list[str]) -> Path:
    """Write pictures of these names, seeds in their order."""
    for seed, name in enumerate(names):
        save(folder / name, noise(seed=seed))
    return folder

"""Artefacts that caches, few steps and small decoders leave in pictures, in known strengths.

The feature extractor is trained to see them and its sensitivity is measured with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

RANGES = {
    "blur": (0.04, 1.0),
    "noise": (0.004, 0.1),
    "ghost": (0.03, 0.5),
    "echo": (0.04, 0.5),
    "patch": (0.004, 0.08),
    "color": (0.02, 0.3),
    "grid": (0.003, 0.05),
}
"""Least and greatest strength of each kind in training; `corrupt` says what a strength is."""

_SIGMA = 1.5
_FARTHEST = 6


def corrupt(pictures: Tensor, kind: str, strength: float | Tensor, seed: int = 0) -> Tensor:
    """Put one kind of artefact into pictures and round them to eight bits again.

    | kind   | artefact                                           | strength                       |
    |--------|----------------------------------------------------|--------------------------------|
    | blur   | mixture with a Gaussian blur of 1.5 pixels         | share of the blurred picture   |
    | noise  | independent Gaussian noise                         | standard deviation             |
    | ghost  | mixture with the previous picture of the batch     | share of the other picture     |
    | echo   | mixture with a copy shifted by up to 6 pixels      | share of the copy              |
    | patch  | an offset for every patch of 4 or 8 pixels         | standard deviation             |
    | color | contrast and gain of each channel                  | greatest change of the factors |
    | grid   | checkerboard, or lines every 4 or 8 pixels         | amplitude                      |

    Args:
        pictures: uint8 [N, 3, H, W].
        kind: One of `RANGES`.
        strength: Dimensionless, where offsets and amplitudes are shares of the full range of 255;
            one number, or float [N].
        seed: Seed of the random parts.

    Returns:
        Pictures, uint8 [N, 3, H, W].

    Raises:
        ValueError: If the kind is unknown, or a ghost is asked for in a single picture.
    """
    if kind not in _MAKERS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(_MAKERS)}")
    if kind == "ghost" and len(pictures) < 2:
        raise ValueError(f"a ghost mixes two pictures; got {len(pictures)}, pass at least 2")
    generator = torch.Generator().manual_seed(seed)
    amount = torch.as_tensor(strength, dtype=torch.float32).reshape(-1, 1, 1, 1)
    changed = _MAKERS[kind](pictures.float() / 255, amount, generator)
    return (255 * changed).round().clamp(0, 255).to(torch.uint8)


def _blur(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    taps = torch.exp(-0.5 * (torch.arange(-4.0, 5.0) / _SIGMA) ** 2)
    taps = (taps / taps.sum()).reshape(1, 1, 1, -1).expand(3, 1, 1, -1)
    padded = functional.pad(pictures, (4, 4, 4, 4), mode="replicate")
    rows = functional.conv2d(padded, taps, groups=3)
    return torch.lerp(pictures, functional.conv2d(rows, taps.mT, groups=3), amount)


def _noise(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    return pictures + amount * torch.randn(pictures.shape, generator=generator)


def _ghost(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    return torch.lerp(pictures, pictures.roll(1, 0), amount)


def _echo(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    count, _, height, width = pictures.shape
    size = torch.randint(2, _FARTHEST + 1, (2, count, 1), generator=generator)
    sign = 2 * torch.randint(0, 2, (2, count, 1), generator=generator) - 1
    down, right = size * sign
    rows = (torch.arange(height) + down).clamp(0, height - 1)[:, :, None]
    columns = (torch.arange(width) + right).clamp(0, width - 1)[:, None, :]
    shifted = pictures.movedim(1, -1)[torch.arange(count)[:, None, None], rows, columns]
    return torch.lerp(pictures, shifted.movedim(-1, 1), amount)


def _patch(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    count, channels, height, width = pictures.shape
    offsets = torch.empty_like(pictures)
    for first, edge in ((0, 4), (1, 8)):
        grid = (len(range(first, count, 2)), channels, -(-height // edge), -(-width // edge))
        fine = torch.randn(grid, generator=generator)
        fine = fine.repeat_interleave(edge, 2).repeat_interleave(edge, 3)
        offsets[first::2] = fine[:, :, :height, :width]
    return pictures + amount * offsets


def _color(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    factors = 1 + amount * (2 * torch.rand(len(pictures), 4, 1, 1, generator=generator) - 1)
    middle = pictures.mean(dim=(1, 2, 3), keepdim=True)
    return (middle + (pictures - middle) * factors[:, :1]) * factors[:, 1:]


def _grid(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    rows = torch.arange(pictures.shape[2])[:, None]
    columns = torch.arange(pictures.shape[3])[None, :]
    patterns = [1.0 - 2.0 * ((rows + columns) % 2)]
    for edge in (4, 8):
        patterns.append(((rows % edge == 0) | (columns % edge == 0)).float())
    chosen = torch.randint(0, len(patterns), (len(pictures),), generator=generator)
    return pictures + amount * torch.stack(patterns)[chosen][:, None]


_MAKERS: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "blur": _blur,
    "noise": _noise,
    "ghost": _ghost,
    "echo": _echo,
    "patch": _patch,
    "color": _color,
    "grid": _grid,
}

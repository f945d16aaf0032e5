"""Find the foreground in a noise prediction, without a segmentation model."""

from __future__ import annotations

import torch
from torch import Tensor

_PATCHES = [(frames, size) for frames in (1, 2, 4) for size in (1, 2, 4, 8, 16)]


def token_grid(shape: tuple[int, ...], count: int) -> tuple[int, int, int, int] | None:
    """Return frames, tokens a frame, and patch sizes in time and space of an output's tokens; None for none.

    Of outputs `[B, N, C]`, `[B, C, Y, X]` or `[B, C, F, Y, X]` it is the finest grid of no more tokens than
    there are in the attention, those of text included.
    """
    if len(shape) == 3:
        return (1, shape[1], 1, 1) if shape[1] <= count else None
    if len(shape) not in (4, 5):
        return None
    frames, rows, columns = (1, *shape[2:]) if len(shape) == 4 else shape[2:]
    grids = [
        (frames // time, (rows // size) * (columns // size), time, size)
        for time, size in _PATCHES
        if frames % time == rows % size == columns % size == 0
    ]
    fitting = [grid for grid in grids if grid[0] * grid[1] <= count]
    return max(fitting, key=lambda grid: grid[0] * grid[1], default=None)


def patches(value: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return an output as tokens, `[B, N, C']`, in the order that patch embeddings have."""
    if value.dim() == 3:
        return value
    film = value.unsqueeze(2) if value.dim() == 4 else value
    batch, channels, frames, rows, columns = film.shape
    _, _, time, size = grid
    cut = film.reshape(batch, channels, frames // time, time, rows // size, size, columns // size, size)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, grid[0] * grid[1], -1)


def foreground_of(tokens: Tensor) -> Tensor:
    """Return the tokens whose three principal components have the energy of a foreground, bool `[B, N]`.

    Tokens are `[B, N, C]`, any float dtype; none are, where all are alike.
    """
    centered = tokens.float() - tokens.float().mean(1, keepdim=True)
    _, axes = torch.linalg.eigh(centered.transpose(1, 2) @ centered)
    return above_otsu((centered @ axes[..., -3:]).square().sum(-1))


def above_otsu(values: Tensor) -> Tensor:
    """Return which values `[B, N]` are above Otsu's threshold, which sets two classes furthest apart, bool.

    Exact: every value is tried as the threshold, with no histogram. None are in rows of equal values.
    """
    ordered = values.double().sort(1).values
    count = ordered.shape[1]
    below = torch.arange(1, count + 1, dtype=torch.float64, device=values.device)
    sums = ordered.cumsum(1)
    upper = (count - below).clamp_min(1)
    apart = sums / below - (sums[:, -1:] - sums) / upper
    between = below * (count - below) * apart.square()
    distinct = torch.zeros_like(between)
    distinct[:, :-1] = (ordered[:, 1:] > ordered[:, :-1]).double()  # equal values stay together
    best = (between * distinct).argmax(1, keepdim=True)
    threshold = ordered.gather(1, best)
    return (values.double() > threshold) & (ordered[:, -1:] > ordered[:, :1])

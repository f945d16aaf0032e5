"""Short films of moving shapes, the real films of FVD-lite."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffcache.pipelines.small.scenes import (
    COLORS,
    POSITIONS,
    SIZE,
    SIZES,
    Scene,
    edge_distance,
    sample_scene,
)

FRAMES = 16

_TRAVEL = 10.0
_JITTER = 1.5
_SHADE = 8.0


def film(scene: Scene, rng: np.random.Generator, frames: int = FRAMES) -> NDArray[np.uint8]:
    """Draw a scene whose objects move straight and evenly through their stated positions.

    Args:
        scene: Scene to draw; every object passes its position in the middle of the film.
        rng: Source of the motion, up to 10 pixels to each side and on each axis over the film,
            and of small differences in place and shade.
        frames: Number of frames.

    Returns:
        A film, uint8 [frames, 64, 64, 3].
    """
    axis = np.arange(SIZE) + 0.5
    x, y = axis[None, None, :], axis[None, :, None]
    time = np.linspace(-0.5, 0.5, frames)[:, None, None]

    def shade(name: str) -> NDArray[Any]:
        return np.array(COLORS[name]) + rng.uniform(-_SHADE, _SHADE, 3)

    drawn = np.broadcast_to(shade(scene.background), (frames, SIZE, SIZE, 3)).astype(np.float64)
    for figure in scene.figures:
        center = np.array(POSITIONS[figure.position]) + rng.uniform(-_JITTER, _JITTER, 2)
        across, down = rng.uniform(-_TRAVEL, _TRAVEL, 2)
        u, v = x - (center[0] + across * time), y - (center[1] + down * time)
        u, v = np.broadcast_arrays(u, v)
        cover = np.clip(0.5 - edge_distance(figure.shape, u, v, SIZES[figure.size]), 0, 1)[
            ..., None
        ]
        drawn = drawn * (1 - cover) + shade(figure.color) * cover
    return np.clip(np.round(drawn), 0, 255).astype(np.uint8)


def draw_films(
    count: int, seed: int, *, held: bool | None = True, frames: int = FRAMES
) -> list[Tensor]:
    """Draw films of random scenes.

    Args:
        count: Number of films.
        seed: Seed of the draw.
        held: Split of the combinations: False for training, True for held-out, None for either.
        frames: Number of frames of each film.

    Returns:
        Films, each uint8 [frames, 3, 64, 64].
    """
    rng = np.random.default_rng([seed, 16])
    films = (film(sample_scene(rng, held=held), rng, frames) for _ in range(count))
    return [torch.from_numpy(one).permute(0, 3, 1, 2).contiguous() for one in films]


def film_statistics(frames: Tensor) -> Tensor:
    """Return how the features of a film's frames lie and move, [256].

    They are the mean, the root mean square of the first and of the second differences, and the
    absolute difference of the last and the first, each [64].

    Args:
        frames: Features [F, 64] of consecutive frames, F >= 3.
    """
    first, second = frames.diff(dim=0), frames.diff(n=2, dim=0)
    steps = [change.square().mean(0).sqrt() for change in (first, second)]
    return torch.cat([frames.mean(0), *steps, (frames[-1] - frames[0]).abs()])

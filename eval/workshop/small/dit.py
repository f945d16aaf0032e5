"""The small DiTPipeline that draws one shape of a class: how it is loaded and called.

The shipped directory is an ordinary diffusers pipeline that `DiTPipeline.from_pretrained` loads:

    pipe = load()
    picture = pipe(pipe.get_label_ids(["red ring"]), guidance_scale=3.0).images[0]

`DiTPipeline` has the number of the empty class, 1000, in its source, so the label table has 1001
rows: 35 classes, the empty one, and 965 rows of zeros between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import DiTPipeline
from torch import Tensor

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.scenes import COLORS, SHAPES, Figure, Scene, render, sample_scene
from diffcache.pipelines.small.shipped import loader

DIRECTORY = MODELS / "shapes-dit"
CALL: dict[str, Any] = {"guidance_scale": 3.0}
EMPTY = 1000
LABELS = tuple(f"{color} {shape}" for shape in SHAPES for color in COLORS)
load = loader(DiTPipeline, DIRECTORY)


def label_of(scene: Scene) -> int:
    """Return the class of a scene's first object."""
    figure = scene.figures[0]
    return LABELS.index(f"{figure.color} {figure.shape}")


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw pictures of one large object anywhere on a background of another color.

    Args:
        count: Number of pictures.
        seed: Seed of the draw.

    Returns:
        Classes, int64 [B], and pictures, uint8 [B, 3, 64, 64].
    """
    rng = np.random.default_rng([seed, 35])
    labels, pictures = [], []
    for _ in range(count):
        drawn = sample_scene(rng, held=None, figures=1)
        one = drawn.figures[0]
        scene = Scene(drawn.background, (Figure(one.shape, one.color, "large", one.position),))
        labels.append(label_of(scene))
        pictures.append(render(scene, rng))
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
    return torch.tensor(labels), stacked

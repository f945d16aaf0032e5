"""A small network that reads a 64x64 picture of shapes back into a `Scene`.

It says which stated attributes of a prompt a picture really shows (`prompt_accuracy`), and its
pooled activations serve as picture features (`features`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.scenes import (
    COLORS,
    POSITIONS,
    SHAPES,
    SIZE,
    SIZES,
    Figure,
    Scene,
    parse,
)

DIRECTORY = MODELS / "shapes-classifier"
WIDTH = 96
ATTRIBUTES = ("background", "count", "position", "shape", "color", "size")


class Reading(NamedTuple):
    """Logits: background [B, 7]; per grid position presence [B, 9] and the rest [B, 9, C]."""

    background: Tensor
    presence: Tensor
    shape: Tensor
    color: Tensor
    size: Tensor


class SceneReader(nn.Module):
    """Five convolutions, then one linear readout per position of the 3x3 grid."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        plan = [(3, 16, 1), (16, 32, 2), (32, 64, 2), (64, WIDTH, 2), (WIDTH, WIDTH, 1)]
        for before, after, stride in plan:
            layers.append(nn.Conv2d(before, after, 3, stride, 1, bias=False))
            layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.trunk = nn.Sequential(*layers)
        self.background = nn.Linear(WIDTH, len(COLORS))
        self.parts = [1, len(SHAPES), len(COLORS), len(SIZES)]
        self.cell = nn.Linear(WIDTH, sum(self.parts))

    def features(self, pictures: Tensor) -> Tensor:
        """Return pooled activations [B, 96] of pictures in [-1, 1], [B, 3, 64, 64]."""
        grid: Tensor = self.trunk(pictures)
        return grid.mean(dim=(2, 3))

    def forward(self, pictures: Tensor) -> Reading:
        """Read pictures in [-1, 1], [B, 3, 64, 64]."""
        grid = self.trunk(pictures)
        # The middle 6x6 of the 8x8 grid, by twos: squares centered on the nine positions.
        cells = functional.avg_pool2d(grid[:, :, 1:7, 1:7], 2).flatten(2).transpose(1, 2)
        presence, shape, color, size = self.cell(cells).split(self.parts, dim=-1)
        background = self.background(grid.mean(dim=(2, 3)))
        return Reading(background, presence[..., 0], shape, color, size)


@lru_cache(maxsize=1)
def load_classifier() -> SceneReader:
    """Load the shipped network, in evaluation mode; loaded once."""
    model = SceneReader()
    model.load_state_dict(load_file(DIRECTORY / "model.safetensors"))
    return model.eval().requires_grad_(False)


def to_tensor(images: Tensor | Sequence[Any]) -> Tensor:
    """Bring pictures to float32 [B, 3, 64, 64] in [-1, 1].

    Args:
        images: A sequence of PIL pictures or uint8 arrays [64, 64, 3], or a tensor
            [B, 3, 64, 64]: uint8, or floating point in [-1, 1].

    Raises:
        ValueError: If a picture is not 64x64 with three channels.
    """
    if isinstance(images, Tensor):
        pictures = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
    else:
        arrays = [np.asarray(i.convert("RGB") if isinstance(i, Image.Image) else i) for i in images]
        stacked = torch.from_numpy(np.stack(arrays))
        pictures = stacked.movedim(-1, 1).float() / 127.5 - 1
    if pictures.shape[1:] != (3, SIZE, SIZE):
        raise ValueError(
            f"pictures of shape {tuple(pictures.shape)} cannot be read; pass [B, 3, {SIZE}, {SIZE}]"
        )
    return pictures


@torch.no_grad()
def features(images: Tensor | Sequence[Any]) -> Tensor:
    """Return picture features, float32 [B, 96]."""
    return load_classifier().features(to_tensor(images))


@torch.no_grad()
def read(images: Tensor | Sequence[Any]) -> list[Scene]:
    """Read pictures as scenes; a picture may be read as holding any number of objects."""
    return scenes_of(load_classifier()(to_tensor(images)))


def scenes_of(reading: Reading) -> list[Scene]:
    """Turn logits into the likeliest scenes."""
    colors, sizes, places = list(COLORS), list(SIZES), list(POSITIONS)
    background = reading.background.argmax(-1).tolist()
    present = (reading.presence > 0).tolist()
    shape, color, size = (part.argmax(-1).tolist() for part in reading[2:])
    found = []
    for row, ground in enumerate(background):
        figures = tuple(
            Figure(
                shape=SHAPES[shape[row][cell]],
                color=colors[color[row][cell]],
                size=sizes[size[row][cell]],
                position=place,
            )
            for cell, place in enumerate(places)
            if present[row][cell]
        )
        found.append(Scene(colors[ground], figures))
    return found


def prompt_accuracy(
    images: Tensor | Sequence[Any], prompts: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """Say how much of what the prompts state the pictures show.

    A prompt states its background, the number of its objects, and of every object the position,
    shape, color and size. The last three count as wrong when nothing is found at the position.

    Args:
        images: Pictures as `to_tensor` takes them.
        prompts: Prompt of each picture, in the words of `scenes.prompt`.

    Returns:
        The share of stated attributes read back correctly, over all prompts; and the same for
        each attribute, with `exact` the share of pictures that show everything stated.

    Raises:
        ValueError: If there are not as many prompts as pictures.
    """
    found = read(images)
    if len(found) != len(prompts):
        raise ValueError(f"{len(found)} pictures but {len(prompts)} prompts; pass one for each")
    right: dict[str, list[bool]] = {name: [] for name in ATTRIBUTES}
    exact = []
    for scene, text in zip(found, prompts, strict=True):
        marks = compare(scene, parse(text))
        exact.append(all(all(values) for values in marks.values()))
        for name, values in marks.items():
            right[name] += values
    every = [value for values in right.values() for value in values]
    shares = {name: float(np.mean(values)) for name, values in right.items()}
    return float(np.mean(every)), {**shares, "exact": float(np.mean(exact))}


def shows_all(found: Scene, stated: Scene) -> bool:
    """Say whether a scene shows everything stated, and no object besides."""
    return all(all(values) for values in compare(found, stated).values())


def compare(found: Scene, stated: Scene) -> dict[str, list[bool]]:
    """Mark each attribute of the stated scene as shown in the found one or not."""
    there = {figure.position: figure for figure in found.figures}
    marks: dict[str, list[bool]] = {name: [] for name in ATTRIBUTES}
    marks["background"].append(found.background == stated.background)
    marks["count"].append(len(found.figures) == len(stated.figures))
    for figure in stated.figures:
        seen = there.get(figure.position)
        marks["position"].append(seen is not None)
        for name in ("shape", "color", "size"):
            marks[name].append(seen is not None and getattr(seen, name) == getattr(figure, name))
    return marks

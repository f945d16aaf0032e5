"""Features of 64x64 pictures of shapes that respond to content and to artefacts alike.

`load` reads the shipped networks: an `Extractor`, whose standardised 64 features stand behind the
offline metrics with the suffix `-lite`, and a `Matcher` of pictures and prompts. Pictures of any
other size are resized to 64x64 by antialiased bilinear interpolation first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn
from torch.nn import functional

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.classifier import Reading
from diffcache.pipelines.small.scenes import (
    COLORS,
    POSITIONS,
    SHAPES,
    SIZE,
    SIZES,
    Scene,
    render,
    sample_scene,
)

DIRECTORY = MODELS / "shapes-features"
WIDTHS = (16, 32, 64, 96)
FEATURES = 64
JOINT = 32
# Larger ones take twice as long: their activations no longer fit what the allocator keeps.
BATCH = 32

_CELL = [1, len(SHAPES), len(COLORS), len(SIZES)]
_SLOTS = len(COLORS) + len(POSITIONS) * sum(_CELL)
_EDGE = 4


class Extractor(nn.Module):
    """Four convolutions with average pooling between, and two linear maps to 64 features.

    The features are a linear map of the mean and root mean square of the maps of all four levels,
    plus a linear map of the last one pooled to 4x4; `centre` and `scale` bring clean pictures to
    mean 0 and a mean standard deviation of 1.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        widths = (3, *WIDTHS)
        self.levels = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, 1, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            )
            for before, after in pairwise(widths)
        )
        self.pooled = nn.Linear(2 * sum(WIDTHS), FEATURES)
        self.placed = nn.Linear(_EDGE * _EDGE * WIDTHS[-1], FEATURES, bias=False)
        self.background = nn.Linear(WIDTHS[-1], len(COLORS))
        self.cell = nn.Linear(WIDTHS[-1], sum(_CELL))
        self.register_buffer("centre", torch.zeros(FEATURES))  # as in the shipped file
        self.register_buffer("scale", torch.ones(()))

    def maps(self, pictures: Tensor) -> list[Tensor]:
        """Return the maps of the four levels of pictures in [-1, 1], [B, 3, 64, 64]."""
        found: list[Tensor] = []
        for level in self.levels:
            pictures = level(functional.avg_pool2d(pictures, 2) if found else pictures)
            found.append(pictures)
        return found

    def raw(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the features [B, 64] of maps, not standardised."""
        mean = [level.mean(dim=(2, 3)) for level in maps]
        # The small number keeps the slope of the root finite where a channel is silent.
        rms = [level.square().mean(dim=(2, 3)).add(1e-6).sqrt() for level in maps]
        placed = functional.adaptive_avg_pool2d(maps[-1], _EDGE).flatten(1)
        found: Tensor = self.pooled(torch.cat(mean + rms, 1)) + self.placed(placed)
        return found

    def forward(self, pictures: Tensor) -> Tensor:
        """Return standardised features [B, 64] of pictures in [-1, 1], [B, 3, 64, 64]."""
        return (self.raw(self.maps(pictures)) - self.centre) / self.scale

    def read(self, last: Tensor) -> Reading:
        """Read the scene from the last map, [B, 96, 8, 8]."""
        shown = self.cell(cells(last).flatten(2).transpose(1, 2))
        presence, shape, color, size = shown.split(_CELL, dim=-1)
        background = self.background(last.mean(dim=(2, 3)))
        return Reading(background, presence[..., 0], shape, color, size)


class Matcher(nn.Module):
    """Two small perceptrons that bring a picture and a prompt to the same 32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        inputs = FEATURES + len(POSITIONS) * WIDTHS[-1]
        self.picture = nn.Sequential(nn.Linear(inputs, 128), nn.GELU(), nn.Linear(128, JOINT))
        self.prompt = nn.Sequential(nn.Linear(_SLOTS, 128), nn.GELU(), nn.Linear(128, JOINT))

    def forward(self, pictures: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors [B, 32] of each.

        Args:
            pictures: `picture_inputs`, float [B, 928].
            prompts: `slots`, float [B, 142].
        """
        return (
            functional.normalize(self.picture(pictures), dim=-1),
            functional.normalize(self.prompt(prompts), dim=-1),
        )


def cells(last: Tensor) -> Tensor:
    """Pool the last map [B, 96, 8, 8] to squares on the nine positions, [B, 96, 3, 3]."""
    return functional.avg_pool2d(last[:, :, 1:7, 1:7], 2)


def picture_inputs(extractor: Extractor, maps: Sequence[Tensor]) -> Tensor:
    """Return what the matcher knows of a picture: features and pooled last map, [B, 928]."""
    features = (extractor.raw(maps) - extractor.centre) / extractor.scale
    return torch.cat([features, cells(maps[-1]).flatten(1)], 1)


def slots(scenes: Sequence[Scene]) -> Tensor:
    """Write scenes as zeros and ones, float32 [B, 142]: background, then the nine positions.

    A position has one number for presence and one for each shape, color and size.
    """
    colors, sizes, places = list(COLORS), list(SIZES), list(POSITIONS)
    ground = torch.zeros(len(scenes), len(colors))
    grid = torch.zeros(len(scenes), len(places), sum(_CELL))
    for row, scene in enumerate(scenes):
        ground[row, colors.index(scene.background)] = 1
        for figure in scene.figures:
            shape = 1 + SHAPES.index(figure.shape)
            color = 1 + len(SHAPES) + colors.index(figure.color)
            size = 1 + len(SHAPES) + len(colors) + sizes.index(figure.size)
            grid[row, places.index(figure.position), [0, shape, color, size]] = 1
    return torch.cat([ground, grid.flatten(1)], 1)


def first_shape(reading: Reading) -> Tensor:
    """Return probabilities of the shape of the object that comes first in reading order, [B, 5].

    Position i holds the first object if it holds one and no earlier position does; the shape's
    probabilities are mixed with these weights, and evenly where no object is found at all.
    """
    there = reading.presence.double().sigmoid()
    none_before = functional.pad((1 - there).cumprod(-1), (1, 0), value=1.0)
    weights = there * none_before[:, :-1]
    shapes = reading.shape.double().softmax(-1)
    return (weights[..., None] * shapes).sum(1) + none_before[:, -1:] / len(SHAPES)


def reference_pictures(count: int, seed: int = 41) -> Tensor:
    """Draw the first of the pictures that the shipped reference was measured on.

    Args:
        count: Number of pictures, of the 10,000 of the reference, each drawn from its own numbers.
        seed: Seed of the draw; 41 is that of the shipped reference.

    Returns:
        Pictures of held-out combinations, uint8 [count, 3, 64, 64].
    """
    drawn = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        drawn.append(render(sample_scene(rng, held=True), rng))
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous()


class Shipped(NamedTuple):
    """The shipped networks, in evaluation mode, and their record `config.json`."""

    extractor: Extractor
    matcher: Matcher
    config: dict[str, Any]


@lru_cache(maxsize=2)
def load(folder: Path = DIRECTORY, device: str = "cpu") -> Shipped:
    """Load the networks; loaded once.

    Args:
        folder: Folder with `model.safetensors` and `config.json`.
        device: Place of the networks, as torch names it.

    Raises:
        ValueError: If the weights are not those that the record names.
    """
    config = read_config(folder)
    stored = _checked(folder / "model.safetensors", config["sha256"])
    extractor, matcher = Extractor(), Matcher()
    for name, model in (("extractor", extractor), ("matcher", matcher)):
        own = {k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(name)}
        model.load_state_dict({key: value.float() for key, value in own.items()})
        model.eval().requires_grad_(False).to(device)
    return Shipped(extractor, matcher, config)


@lru_cache(maxsize=2)
def load_reference(folder: Path = DIRECTORY) -> dict[str, Tensor]:
    """Load the statistics of real pictures and films; loaded once.

    Args:
        folder: Folder with `reference.safetensors` and `config.json`.

    Returns:
        Of pictures, `mean` [64], `cov` [64, 64] and `count` [], float64, and the first `features`
        [2000, 64], float16. Of films, `film_centre` and `film_scale` [256] of what
        `moving.film_statistics` returns, `film_components` [256, 64], and the `film_mean`,
        `film_cov` and `film_count` of what these make of it, float64.

    Raises:
        ValueError: If the file is not the one that the record names.
    """
    return _checked(folder / "reference.safetensors", read_config(folder)["reference_sha256"])


def read_config(folder: Path = DIRECTORY) -> dict[str, Any]:
    """Read the record of the training, `config.json`."""
    read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read


def _checked(file: Path, sha256: str) -> dict[str, Tensor]:
    content = file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{file} has sha256 {found} but config.json says {sha256}; restore both, or train "
            "again with python -m diffcache.eval.workshop.small.trainer shapes-matcher"
        )
    loaded: dict[str, Tensor] = parse_safetensors(content)
    return loaded


def check(pictures: Tensor, name: str = "pictures") -> Tensor:
    """Return the pictures if they are uint8 [N, 3, H, W] with N >= 1.

    Raises:
        ValueError: If they are not.
    """
    if pictures.dtype != torch.uint8 or pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ValueError(
            f"{name} are {pictures.dtype} {list(pictures.shape)}; pass torch.uint8 [N, 3, H, W]"
        )
    if 0 in pictures.shape:
        raise ValueError(f"{name} are empty, {list(pictures.shape)}; pass at least one")
    return pictures


def to_unit(pictures: Tensor) -> Tensor:
    """Bring pictures to float32 [N, 3, 64, 64] in [-1, 1].

    Args:
        pictures: uint8 [N, 3, H, W]; another size than 64x64 is resized by antialiased bilinear
            interpolation.
    """
    unit = pictures.float() / 127.5 - 1
    if unit.shape[2:] != (SIZE, SIZE):
        unit = functional.interpolate(unit, (SIZE, SIZE), mode="bilinear", antialias=True)
    return unit.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def in_batches(work: Callable[..., Tensor], *pictures: Tensor) -> Tensor:
    """Apply a function to batches of 32, so that memory does not grow with their number.

    Args:
        work: Takes as many tensors [B, 3, 64, 64] in [-1, 1] as there are sets.
        pictures: Sets of equal length, each uint8 [N, 3, H, W].

    Returns:
        The results, joined, on the CPU.
    """
    parts = zip(*(one.split(BATCH) for one in pictures), strict=True)
    return torch.cat([work(*(to_unit(one) for one in part)).cpu() for part in parts])

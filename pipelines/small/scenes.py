"""Pictures of a few colored shapes and the English sentences that describe them.

This is the whole data set of the shipped 64x64 models: a `Scene` is drawn at random, written as a
sentence by `prompt`, drawn as a picture by `render` and read back from the sentence by `parse`, so
that a model can be trained and its accuracy measured without any downloaded data.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZE = 64
SHAPES = ("circle", "square", "triangle", "ring", "cross")
COLORS = {
    "red": (222, 50, 45),
    "green": (50, 165, 70),
    "blue": (45, 85, 215),
    "yellow": (247, 214, 60),
    "purple": (150, 60, 185),
    "white": (242, 242, 242),
    "black": (28, 28, 32),
}
SIZES = {"small": 7.0, "large": 12.0}
POSITIONS = {
    "top left": (16, 16),
    "top": (32, 16),
    "top right": (48, 16),
    "left": (16, 32),
    "center": (32, 32),
    "right": (48, 32),
    "bottom left": (16, 48),
    "bottom": (32, 48),
    "bottom right": (48, 48),
}
PLACES = {
    name: ("in the " if name == "center" else "on the " if name in ("left", "right") else "at the ")
    + name
    for name in POSITIONS
}
HELD_OUT_SHARE = 16
PROMPTS_FILE = Path(__file__).resolve().parents[2] / "assets" / "prompts" / "shapes.txt"

_JITTER_PIXELS = 1.5
_JITTER_SIZE = 0.05
_JITTER_SHADE = 8.0
_APART_PIXELS = 32


@dataclass(frozen=True, order=True, slots=True)
class Figure:
    """One object of a scene, in the words a prompt uses for it."""

    shape: str
    color: str
    size: str
    position: str

    def __str__(self) -> str:
        """Return the object as a noun phrase."""
        return f"a {self.size} {self.color} {self.shape} {PLACES[self.position]}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A background and one or two objects; what a prompt says and nothing else."""

    background: str
    figures: tuple[Figure, ...]

    def key(self) -> str:
        """Return a text that is the same for every order of the objects."""
        parts = [f"{f.shape} {f.color} {f.size} {f.position}" for f in sorted(self.figures)]
        return "|".join([self.background, *parts])


def held_out(scene: Scene) -> bool:
    """Say whether a combination of attributes is kept out of training (one in sixteen)."""
    digest = hashlib.sha256(scene.key().encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def sample_scene(
    rng: np.random.Generator, *, held: bool | None = False, figures: int | None = None
) -> Scene:
    """Draw a scene.

    Args:
        rng: Source of randomness.
        held: False for training combinations, True for held-out ones, None for either.
        figures: Number of objects, 1 or 2; drawn at random (one in four is single) when None.

    Returns:
        A scene whose objects do not overlap and differ in color from the background.
    """
    while True:
        scene = _draw(rng, figures)
        if held is None or held_out(scene) == held:
            return scene


def _draw(rng: np.random.Generator, figures: int | None) -> Scene:
    count = figures or (1 if rng.random() < 0.25 else 2)
    background = str(rng.choice(list(COLORS)))
    colors = [name for name in COLORS if name != background]
    places = list(POSITIONS)
    if count == 2:
        places = [name for name in places if name != "center"]
    first = str(rng.choice(places))
    chosen = [first]
    if count == 2:
        x, y = POSITIONS[first]
        apart = [
            name
            for name, (u, v) in POSITIONS.items()
            if max(abs(u - x), abs(v - y)) >= _APART_PIXELS
        ]
        chosen.append(str(rng.choice(apart)))
    made = tuple(
        Figure(
            shape=str(rng.choice(SHAPES)),
            color=str(rng.choice(colors)),
            size=str(rng.choice(list(SIZES))),
            position=place,
        )
        for place in chosen
    )
    return Scene(background, made)


def prompt(scene: Scene, phrasing: int = 0) -> str:
    """Write a scene as a sentence.

    Args:
        scene: Scene to describe.
        phrasing: 0 names the background last, 1 names it first.
    """
    objects = " and ".join(str(figure) for figure in scene.figures)
    if phrasing == 0:
        return f"{objects}, on a {scene.background} background"
    if phrasing == 1:
        return f"a {scene.background} background with {objects}"
    raise ValueError(f"unknown phrasing {phrasing!r}; use 0 or 1")


_FIGURE = re.compile(
    rf"\b({'|'.join(SIZES)})\s+({'|'.join(COLORS)})\s+({'|'.join(SHAPES)})\s+"
    rf"(?:on|at|in)\s+the\s+({'|'.join(sorted(POSITIONS, key=len, reverse=True))})\b"
)
_BACKGROUND = re.compile(rf"\b({'|'.join(COLORS)})\s+background\b")


def parse(text: str) -> Scene:
    """Read a sentence back into the scene it describes.

    Raises:
        ValueError: If the text names no background or no object in the words of `prompt`.
    """
    ground = _BACKGROUND.search(text.lower())
    found = [
        Figure(shape=shape, color=color, size=size, position=position)
        for size, color, shape, position in _FIGURE.findall(text.lower())
    ]
    if ground is None or not found:
        raise ValueError(
            f"cannot read {text!r}; write it like {prompt(Scene('yellow', (EXAMPLE,)))!r}"
        )
    return Scene(ground.group(1), tuple(found))


EXAMPLE = Figure(shape="ring", color="red", size="small", position="left")


def edge_distance(
    shape: str, u: NDArray[Any], v: NDArray[Any], radius: float | NDArray[Any]
) -> NDArray[Any]:
    """Return the signed distance in pixels to a shape's edge, negative inside."""
    length = np.hypot(u, v)
    if shape == "circle":
        return np.asarray(length - 0.95 * radius)
    if shape == "ring":
        return np.asarray(np.abs(length - 0.75 * radius) - 0.26 * radius)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(u), np.abs(v)) - 0.85 * radius)
    if shape == "triangle":
        v = v - 0.15 * radius
        slant = 0.8660254 * np.abs(u) - 0.5 * v
        return np.asarray(np.maximum(slant, v) - 0.55 * radius)
    if shape == "cross":
        arm, reach = 0.32 * radius, 0.98 * radius
        across = np.maximum(np.abs(u) - reach, np.abs(v) - arm)
        down = np.maximum(np.abs(u) - arm, np.abs(v) - reach)
        return np.asarray(np.minimum(across, down))
    raise ValueError(f"unknown shape {shape!r}; use one of {SHAPES}")


def render(scene: Scene, rng: np.random.Generator | None = None) -> NDArray[np.uint8]:
    """Draw a scene with anti-aliased edges (exact distance, one pixel wide).

    Args:
        scene: Scene to draw.
        rng: Source of the small differences in place, size and shade that a prompt does not
            mention; None draws the plain picture.

    Returns:
        A picture, uint8 [64, 64, 3].
    """

    def jitter(scale: float, count: int) -> NDArray[Any]:
        return np.zeros(count) if rng is None else rng.uniform(-scale, scale, count)

    axis = np.arange(SIZE) + 0.5
    x, y = axis[None, :], axis[:, None]
    shade = np.array(COLORS[scene.background]) + jitter(_JITTER_SHADE, 3)
    picture = np.broadcast_to(shade, (SIZE, SIZE, 3)).astype(np.float64)
    for figure in scene.figures:
        center = np.array(POSITIONS[figure.position]) + jitter(_JITTER_PIXELS, 2)
        radius = SIZES[figure.size] * (1 + float(jitter(_JITTER_SIZE, 1)[0]))
        distance = edge_distance(figure.shape, x - center[0], y - center[1], radius)
        cover = np.clip(0.5 - distance, 0, 1)[..., None]
        shade = np.array(COLORS[figure.color]) + jitter(_JITTER_SHADE, 3)
        picture = picture * (1 - cover) + shade * cover
    return np.clip(np.round(picture), 0, 255).astype(np.uint8)


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return prompts whose combinations of attributes no model was trained on.

    Args:
        count: Number of prompts; all different.
        seed: Seed of the draw.
    """
    rng = np.random.default_rng([seed, 20_240])
    scenes: dict[str, str] = {}
    while len(scenes) < count:
        scene = sample_scene(rng, held=True)
        scenes.setdefault(scene.key(), prompt(scene, int(rng.integers(2))))
    return list(scenes.values())


def held_out_singles(seed: int = 0) -> list[str]:
    """Return a prompt for every scene of one object that no model was trained on, 236 in all.

    Args:
        seed: Seed of their order and wording.
    """
    rng = np.random.default_rng([seed, 20_261])
    figures = itertools.product(SHAPES, COLORS, SIZES, POSITIONS)
    scenes = [
        Scene(ground, (Figure(*figure),))
        for figure, ground in itertools.product(figures, COLORS)
        if figure[1] != ground
    ]
    held = [scene for scene in scenes if held_out(scene)]
    return [prompt(held[number], int(rng.integers(2))) for number in rng.permutation(len(held))]


def shipped_prompts() -> list[str]:
    """Return the 64 held-out prompts of `assets/prompts/shapes.txt`."""
    return PROMPTS_FILE.read_text(encoding="utf-8").split("\n")[:-1]


def draw(count: int, seed: int, *, held: bool | None = False) -> tuple[list[Scene], Tensor]:
    """Draw scenes and their pictures.

    Args:
        count: Number of scenes.
        seed: Seed of the draw.
        held: Split of the combinations: False for training, True for held-out, None for either.

    Returns:
        The scenes and their pictures, uint8 [B, 3, 64, 64].
    """
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng, held=held) for _ in range(count)]
    pictures = np.stack([render(scene, rng) for scene in scenes])
    return scenes, torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()

"""Scenes that the sticker models are trained on: pictures of one or two objects on a ground.

Objects are 24 drawings of Noto Emoji, grounds are photographs and gradients
(`assets/stickers/README.md` names sources and licenses). A sentence names the objects, at times
where they stand to each other, and at times the ground. All else stays unsaid: place, size, tilt,
mirroring, light, and the colors of the ground. A model of these scenes has to decide as much by
itself as models of photographs do, so its sampling path bends as theirs does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from diffcache.eval.workshop.small.job import draw_each

SIDE = 64
OBJECTS = (
    "fox", "panda", "lion", "frog", "penguin", "owl", "butterfly", "turtle",
    "fish", "whale", "crab", "strawberry", "pineapple", "burger", "cupcake", "car",
    "rocket", "house", "umbrella", "guitar", "gift", "sunflower", "mushroom", "pumpkin",
)  # fmt: skip
RELATIONS = ("left of", "right of", "above", "below")
GROUNDS = {
    "gradient": "",
    "stripes": "on stripes",
    "sky": "in the sky",
    "bricks": "on bricks",
    "grass": "on grass",
    "gravel": "on gravel",
    "wood": "on wood",
    "space": "in space",
}
ART = Path(__file__).resolve().parents[3] / "assets" / "stickers"
_HELD_EVERY = 10
_LEAST_APART = 6  # pixels between the centers of two objects whose relation is said
_GAP = 0.46  # least distance of two centers, as a share of the sum of their sizes

Array = NDArray[Any]


@dataclass(frozen=True)
class Sticker:
    """One object of a scene.

    Attributes:
        name: One of `OBJECTS`.
        x: Horizontal place of its center in pixels, from the left.
        y: Vertical place of its center in pixels, from the top.
        size: Side in pixels of the square that holds the upright drawing.
        tilt: Rotation in degrees, counterclockwise.
        mirrored: Whether left and right are exchanged.
        light: Factor of its brightness, dimensionless.
    """

    name: str
    x: float
    y: float
    size: int
    tilt: float
    mirrored: bool
    light: float


@dataclass(frozen=True)
class Scene:
    """Objects in order of the sentence, the ground, and what the sentence says of them.

    Attributes:
        stickers: One or two objects; later ones are drawn over earlier ones.
        ground: One of `GROUNDS`.
        seed: Seed of the ground's colors and of its texture's place.
        relation: Relation of the first object to the second that is said; "" says nothing.
        says_ground: Whether the sentence names the ground.
    """

    stickers: tuple[Sticker, ...]
    ground: str
    seed: int
    relation: str = ""
    says_ground: bool = False


def sample_scene(rng: np.random.Generator, *, held: bool = False, single: float = 0.45) -> Scene:
    """Draw a scene, with combinations that training leaves out or with the others.

    Args:
        rng: Source of randomness.
        held: Draw one of the held-out combinations; else none of them.
        single: Share of scenes with one object.
    """
    while True:
        ground = str(rng.choice(list(GROUNDS)))
        count = 1 if rng.random() < single else 2
        names = tuple(str(name) for name in rng.choice(OBJECTS, count, replace=False))
        if held_out(names, ground) == held:
            break
    stickers = place(names, rng)
    relation, says_ground = say(stickers, ground, rng)
    return Scene(stickers, ground, int(rng.integers(1 << 31)), relation, says_ground)


def say(stickers: tuple[Sticker, ...], ground: str, rng: np.random.Generator) -> tuple[str, bool]:
    """Choose which relation of two objects a sentence says, "" for none, and whether it names the ground."""
    relation = ""
    if len(stickers) == 2 and rng.random() < 0.7:
        relation = str(rng.choice(true_relations(*stickers)))
    return relation, ground != "gradient" and bool(rng.random() < 0.5)


def draw_scenes(count: int, seed: int, *, held: bool = False, single: float = 0.45) -> list[Scene]:
    """Draw scenes, each from a seed of its own; see `sample_scene`."""
    return draw_each(sample_scene, count, seed, held=held, single=single)


def held_out(names: tuple[str, ...], ground: str) -> bool:
    """Tell whether a combination is left out of training.

    One pair of objects in ten, whatever their order, and one in ten of an object alone on a ground.
    """
    key = "+".join(sorted(names)) if len(names) > 1 else f"{names[0]}@{ground}"
    return zlib.crc32(key.encode()) % _HELD_EVERY == 0


def place(names: tuple[str, ...], rng: np.random.Generator) -> tuple[Sticker, ...]:
    """Place objects at random so that none is cut off and two hardly overlap."""
    smallest, largest = (26, 46) if len(names) == 1 else (20, 32)
    while True:
        sizes = rng.integers(smallest, largest, len(names), endpoint=True)
        centers = [rng.uniform(size / 2, SIDE - size / 2, 2) for size in sizes]
        if len(names) == 1:
            break
        if apart(centers[0] - centers[1], sizes.sum()):
            break
    return tuple(
        Sticker(
            name,
            x=float(center[0]),
            y=float(center[1]),
            size=int(size),
            tilt=float(rng.uniform(-18, 18)),
            mirrored=bool(rng.random() < 0.5),
            light=float(rng.uniform(0.82, 1.1)),
        )
        for name, center, size in zip(names, centers, sizes, strict=True)
    )


def apart(offset: Array, sizes: float) -> bool:
    """Tell whether two objects hardly overlap, and stand so that their relation can be said.

    Args:
        offset: Distances of their centers in pixels, across and down.
        sizes: Sum of their sizes in pixels.
    """
    return bool(np.abs(offset).max() >= max(_GAP * sizes, _LEAST_APART))


def true_relations(first: Sticker, second: Sticker) -> list[str]:
    """Return the relations of the first object to the second that a person would say.

    A relation holds where it is along the larger of both distances, or nearly as large.
    """
    across, down = first.x - second.x, first.y - second.y
    least = max(_LEAST_APART, 0.7 * max(abs(across), abs(down)))
    tests = {"left of": -across, "right of": across, "above": -down, "below": down}
    return [name for name, distance in tests.items() if distance >= least]


def caption(scene: Scene) -> str:
    """Write a scene as a sentence, such as "a fox left of an owl on grass"."""
    joint = f" {scene.relation} " if scene.relation else " and "
    text = joint.join(with_article(sticker.name) for sticker in scene.stickers)
    return f"{text} {GROUNDS[scene.ground]}" if scene.says_ground else text


def with_article(name: str) -> str:
    """Return a noun with its article."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def words() -> list[str]:
    """Return every word a sentence can hold, sorted."""
    said = " ".join([*RELATIONS, *GROUNDS.values()]).split()
    return sorted({*OBJECTS, *said, "a", "an", "and"})


def held_out_captions(count: int, seed: int = 0) -> list[str]:
    """Return sentences of held-out combinations, all different.

    Args:
        count: Number of sentences.
        seed: Seed of the draw.
    """
    rng = np.random.default_rng([seed, 31_007])
    said: dict[str, None] = {}
    while len(said) < count:
        said.setdefault(caption(sample_scene(rng, held=True)))
    return list(said)


def parse(text: str) -> tuple[tuple[str, ...], str, str]:
    """Read a sentence: names of the objects, their relation ("" if unsaid), the ground ("").

    Raises:
        ValueError: If the sentence is not one that `caption` writes.
    """
    ground = next((g for g, said in GROUNDS.items() if said and text.endswith(f" {said}")), "")
    rest = text.removesuffix(f" {GROUNDS[ground]}") if ground else text
    for name in OBJECTS:
        if rest == with_article(name):
            return (name,), "", ground
    for joint in (*RELATIONS, "and"):
        parts = rest.split(f" {joint} ")
        if len(parts) == 2:
            names = tuple(part.split(" ", 1)[-1] for part in parts)
            if set(names) <= set(OBJECTS):
                return names, "" if joint == "and" else joint, ground
    example = "a fox left of an owl on grass"
    raise ValueError(f"cannot read {text!r}; write it like {example!r}")


def render(scene: Scene) -> Array:
    """Draw a scene; uint8 [64, 64, 3]."""
    picture = ground(scene.ground, scene.seed)
    for sticker in scene.stickers:
        picture, _ = put(picture, sticker)
    return to_bytes(picture)


def put(picture: Array, sticker: Sticker) -> tuple[Array, Array]:
    """Draw an object and its shadow over a picture.

    Args:
        picture: What is behind it, float64 [64, 64, 3] in [0, 255].
        sticker: The object.

    Returns:
        The picture with it, and its cover, float64 [64, 64] in [0, 1].
    """
    color, cover = layer(sticker)
    shadow = np.zeros_like(cover)
    shadow[2:, 1:] = 0.25 * cover[:-2, :-1]
    picture = picture * (1 - shadow[..., None])
    return picture * (1 - cover[..., None]) + color * cover[..., None], cover


def to_bytes(picture: Array) -> Array:
    """Round a picture to uint8."""
    return np.clip(np.round(picture), 0, 255).astype(np.uint8)


def layer(sticker: Sticker) -> tuple[Array, Array]:
    """Draw an object alone: colors float64 [64, 64, 3] and its cover [64, 64] in [0, 1]."""
    reduced = _reduced(sticker.name, sticker.size, sticker.mirrored)
    # Rotating within a larger square keeps the corners, and one resampling keeps the edges sharp.
    cosine, sine = np.cos(np.radians(sticker.tilt)), np.sin(np.radians(sticker.tilt))
    scale = reduced.width / sticker.size
    middle = reduced.width / 2
    matrix = (
        scale * cosine,
        -scale * sine,
        middle - scale * (cosine * sticker.x - sine * sticker.y),
        scale * sine,
        scale * cosine,
        middle - scale * (sine * sticker.x + cosine * sticker.y),
    )
    turned = reduced.transform((SIDE, SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    pixels = np.asarray(turned, np.float64)
    cover = pixels[..., 3] / 255
    # Colors are kept multiplied by the cover: dividing here avoids dark edges of resampling.
    color = pixels[..., :3] / np.maximum(cover, 1 / 255)[..., None]
    return np.clip(color * sticker.light, 0, 255), cover


@cache
def _reduced(name: str, size: int, mirrored: bool) -> Image.Image:
    """Return a drawing as sharp as its size allows, at its full width."""
    drawing = drawings()[name]
    if mirrored:
        drawing = drawing.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return drawing.filter(ImageFilter.GaussianBlur(0.42 * max(drawing.width / size - 1, 0)))


@cache
def drawings() -> dict[str, Image.Image]:
    """Return the objects' drawings by name, RGBa [64, 64] (colors multiplied by their cover)."""
    sheet = Image.open(ART / "objects.png").convert("RGBA")
    made = {}
    for number, name in enumerate(OBJECTS):
        left, top = 64 * (number % 8), 64 * (number // 8)
        tile = np.asarray(sheet.crop((left, top, left + 64, top + 64)), np.float64)
        tile = np.concatenate([tile[..., :3] * tile[..., 3:] / 255, tile[..., 3:]], -1)
        made[name] = Image.fromarray(np.round(tile).astype(np.uint8), "RGBA")
    return made


@cache
def textures() -> dict[str, Array]:
    """Return the photographed grounds by name, float64 [192, 192, 1 or 3] in [0, 1]."""
    gray = np.asarray(Image.open(ART / "grounds.jpg").convert("L"), np.float64) / 255
    color = np.asarray(Image.open(ART / "photos.jpg").convert("RGB"), np.float64) / 255
    made = {name: gray[:, 192 * i : 192 * (i + 1), None] for i, name in enumerate(("bricks", "grass", "gravel"))}
    return made | {"space": color[:, :192], "wood": color[:, 192:]}


def ground(name: str, seed: int) -> Array:
    """Draw a ground with colors and a place of its own; float64 [64, 64, 3] in [0, 255].

    Args:
        name: One of `GROUNDS`.
        seed: Seed of its colors and place.

    Raises:
        ValueError: If there is no such ground.
    """
    if name not in GROUNDS:
        raise ValueError(f"unknown ground {name!r}; use one of {', '.join(GROUNDS)}")
    rng = np.random.default_rng(seed)
    if name == "gradient":
        return _blend(*_colors(rng), _ramp(rng))
    if name == "stripes":
        waves = np.sin(_ramp(rng) * rng.uniform(2.5, 5) * 2 * np.pi + rng.uniform(0, 6.28))
        return _blend(*_colors(rng, 60), 0.5 + 0.5 * np.clip(2.5 * waves, -1, 1))
    if name == "sky":
        return _sky(rng)
    texture = textures()[name]
    side = int(rng.integers(80, 160))
    top, left = rng.integers(0, 192 - side, 2, endpoint=True)
    crop = Image.fromarray((255 * texture[top : top + side, left : left + side].squeeze()).astype("uint8"))
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    contrast = 0.9 if name in ("bricks", "space") else 0.65
    crop = ImageEnhance.Contrast(crop.resize((SIDE, SIDE), Image.Resampling.BOX)).enhance(contrast)
    part = np.asarray(crop, np.float64)
    if part.ndim == 3:
        return part * rng.uniform(0.75, 1.15, 3)
    dark, bright = _TINTS[name]
    shade = rng.uniform(-25, 25, 3)
    return np.clip(_blend(np.array(dark) + shade, np.array(bright) + shade, part / 255), 0, 255)


_TINTS = {
    "bricks": ((70.0, 25, 15), (260.0, 175, 150)),
    "grass": ((10.0, 50, 5), (190.0, 250, 120)),
    "gravel": ((40.0, 40, 45), (235.0, 230, 225)),
}


def _colors(rng: np.random.Generator, spread: float = 90) -> tuple[Array, Array]:
    one = rng.uniform(60, 250, 3)
    return one, np.clip(one + rng.uniform(-spread, spread, 3), 30, 255)


def _ramp(rng: np.random.Generator) -> Array:
    angle = rng.uniform(0, 2 * np.pi)
    axis = np.linspace(0, 1, SIDE)
    ramp = axis[:, None] * np.sin(angle) + axis[None] * np.cos(angle)
    return np.asarray((ramp - ramp.min()) / np.ptp(ramp))


def _blend(one: Array, other: Array, share: Array) -> Array:
    share = share[..., None] if share.ndim == 2 else share
    return np.asarray(one * (1 - share) + other * share)


def _sky(rng: np.random.Generator) -> Array:
    axis = np.arange(SIDE) + 0.5
    deep = np.array([70.0, 140, 225]) + rng.uniform(-30, 30, 3)
    pale = np.array([190.0, 225, 250]) + rng.uniform(-15, 15, 3)
    picture = _blend(deep, pale, np.broadcast_to((axis / SIDE)[:, None], (SIDE, SIDE)))
    for _ in range(int(rng.integers(1, 4))):
        x, y, width = rng.uniform(0, SIDE), rng.uniform(4, 52), rng.uniform(7, 14)
        puffs = [
            ((axis[None] - x - dx * width) ** 2 + (1.5 * (axis[:, None] - y - dy)) ** 2) / width**2
            for dx, dy in ((-0.8, 1), (0, -2), (0.8, 1))
        ]
        cover = np.clip(1.6 * (1 - np.minimum.reduce(puffs)), 0, 1) * 0.85
        picture = _blend(picture, np.array([250.0, 252, 255]), cover)
    return picture

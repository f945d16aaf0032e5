"""Instructions that change one thing of a sticker scene, with the scenes before and after.

All else stays as it is, to the pixel: the other object, the ground and its seed. What an
instruction leaves unsaid (where a new object stands, what was behind one that is removed) a model
has to decide by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from diffcache.eval.workshop.small.job import draw_each
from diffcache.eval.workshop.small.sticker_judge import Reading, load, read
from diffcache.eval.workshop.small.stickers import (
    GROUNDS,
    OBJECTS,
    SIDE,
    Scene,
    Sticker,
    apart,
    held_out,
    place,
    render,
    sample_scene,
    with_article,
    words,
)
from diffcache.psnr import psnr

SIDES = {"left": ("x", -1), "right": ("x", 1), "top": ("y", -1), "bottom": ("y", 1)}
SAID = (
    "replace", "with", "remove", "add", "move", "to", "top", "bottom", "put", "it", "them",
    "make", "larger", "smaller",
)  # fmt: skip
_GROWTH = 1.4
_SIZES = (20, 46)  # least and largest size after a change of it, in pixels
_FAR = 10  # least pixels of a move
_MARGIN = 4  # largest distance in pixels of a moved object from the side
_NEAR = 6  # largest distance in pixels, across and down, from where an object should stand


@dataclass(frozen=True)
class Edit:
    """One change of a scene.

    Attributes:
        kind: One of `KINDS`.
        text: The instruction.
        before: The scene of the reference picture.
        after: The scene that is asked for. An object that is added is its last one, in one of many
            places that would be right; all others have their places of before, but for one that
            is moved.
    """

    kind: str
    text: str
    before: Scene
    after: Scene


def sample_edit(rng: np.random.Generator, *, held: bool = False, kinds: Sequence[str] | None = None) -> Edit:
    """Draw an edit.

    Args:
        rng: Source of randomness.
        held: Draw an edit with a held-out combination as its result; else neither scene is one.
        kinds: Kinds to draw from, one that stands twice twice as often; None for each of `KINDS`.
    """
    kind = str(rng.choice(kinds or KINDS))
    while True:
        scene = sample_scene(rng, held=held and bool(rng.random() < 0.5))
        scene = Scene(scene.stickers, scene.ground, scene.seed)
        changed = _CHANGES[kind](scene, rng)
        if changed is None:
            continue
        text, after = changed
        names = tuple(sticker.name for sticker in after.stickers)
        if held_out(names, after.ground) == held and _stands(after):
            return Edit(kind, text, scene, after)


def draw_edits(count: int, seed: int, *, held: bool = False, kinds: Sequence[str] | None = None) -> list[Edit]:
    """Draw edits, each from a seed of its own; see `sample_edit`."""
    return draw_each(sample_edit, count, seed, 28, held=held, kinds=kinds)


def edit_words() -> list[str]:
    """Return every word that a caption or an instruction can hold, sorted."""
    return sorted({*words(), *SAID, "the"})


def judge(pictures: NDArray[np.uint8], edits: Sequence[Edit]) -> dict[str, Tensor]:
    """Judge edited pictures with the shipped judge.

    Args:
        pictures: Edited pictures, uint8 [N, 64, 64, 3].
        edits: The edits that were asked for.

    Returns:
        `whole_right`, whether a picture shows all objects of the wanted scene, whole, in their places, no
        others, and the ground; `target_right`, whether it shows what the instruction asked for, bool [N]
        each; `untouched_psnr_db`, PSNR in dB to the reference picture where the edit changes nothing, [N].
    """
    whole, target, decibels = [], [], []
    for picture, edit, reading in zip(pictures, edits, read(load(), pictures), strict=True):
        before = torch.from_numpy(render(edit.before))
        mask = untouched(edit, reading)[None, ..., None]
        decibels.append(float(psnr(torch.from_numpy(picture)[None], before[None], mask=mask)))
        whole.append(all_shown(edit, reading))
        target.append(target_shown(edit, reading))
    names = ("whole_right", "target_right", "untouched_psnr_db")
    return {name: torch.tensor(found) for name, found in zip(names, (whole, target, decibels), strict=True)}


def target_shown(edit: Edit, reading: Reading) -> bool:
    """Return whether a picture shows the change that the instruction asked for."""
    gone, new = changed(edit)
    if edit.kind == "ground":
        return reading.ground == edit.after.ground
    shown = {sticker.name: sticker for sticker in reading.stickers}
    left = (*shown, *reading.broken)
    if edit.kind in ("replace", "remove") and gone is not None and gone.name in left:
        return False
    if new is None:
        return True
    if new.name not in shown:
        return False
    return edit.kind == "add" or _as_wanted(new, shown[new.name])


def all_shown(edit: Edit, reading: Reading) -> bool:
    """Tell whether a picture shows the wanted scene, and only it."""
    names = sorted(sticker.name for sticker in edit.after.stickers)
    shown = {sticker.name: sticker for sticker in reading.stickers}
    if sorted(sticker.name for sticker in reading.stickers) != names:
        return False
    if reading.broken or reading.ground != edit.after.ground:
        return False
    placed = edit.after.stickers[:1] if edit.kind == "add" else edit.after.stickers
    return all(_as_wanted(sticker, shown[sticker.name]) for sticker in placed)


def _as_wanted(wanted: Sticker, shown: Sticker) -> bool:
    away = max(abs(wanted.x - shown.x), abs(wanted.y - shown.y))
    return away <= _NEAR and _GROWTH**-0.5 < shown.size / wanted.size < _GROWTH**0.5


def untouched(edit: Edit, reading: Reading) -> Tensor:
    """Return the pixels that an edit leaves as they are, bool [64, 64].

    They are equal before and after, and more than two pixels from any that is not. As an object may
    be added anywhere, its own place counts in the picture that is read.
    """
    after = edit.after
    if edit.kind == "add":
        shown = [s for s in reading.stickers if s.name == after.stickers[-1].name]
        after = replace(edit.before, stickers=(*edit.before.stickers, *shown))
    other = torch.from_numpy((render(edit.before) != render(after)).any(-1)).float()
    return functional.max_pool2d(other[None], 5, 1, 2)[0] == 0


def changed(edit: Edit) -> tuple[Sticker | None, Sticker | None]:
    """Return the object that is only before an edit, and the one that is only after it."""
    old, new = edit.before.stickers, edit.after.stickers
    gone = next((sticker for sticker in old if sticker not in new), None)
    return gone, next((sticker for sticker in new if sticker not in old), None)


def _stands(scene: Scene) -> bool:
    """Tell whether no object is cut off and two hardly overlap."""
    for sticker in scene.stickers:
        half = sticker.size / 2
        if not all(half <= center <= SIDE - half for center in (sticker.x, sticker.y)):
            return False
    if len(scene.stickers) < 2:
        return True
    one, other = scene.stickers
    return apart(np.array([one.x - other.x, one.y - other.y]), one.size + other.size)


Changed = tuple[str, Scene] | None


def _pick(scene: Scene, rng: np.random.Generator) -> tuple[int, Sticker]:
    index = int(rng.integers(len(scene.stickers)))
    return index, scene.stickers[index]


def _with(scene: Scene, index: int, sticker: Sticker) -> Scene:
    stickers = list(scene.stickers)
    stickers[index] = sticker
    return replace(scene, stickers=tuple(stickers))


def _new_name(scene: Scene, rng: np.random.Generator) -> str:
    taken = {sticker.name for sticker in scene.stickers}
    return str(rng.choice([name for name in OBJECTS if name not in taken]))


def _replace(scene: Scene, rng: np.random.Generator) -> Changed:
    index, old = _pick(scene, rng)
    name = _new_name(scene, rng)
    text = f"replace the {old.name} with {with_article(name)}"
    return text, _with(scene, index, replace(old, name=name))


def _remove(scene: Scene, rng: np.random.Generator) -> Changed:
    if len(scene.stickers) < 2:
        return None
    _, old = _pick(scene, rng)
    left = tuple(sticker for sticker in scene.stickers if sticker is not old)
    return f"remove the {old.name}", replace(scene, stickers=left)


def _add(scene: Scene, rng: np.random.Generator) -> Changed:
    if len(scene.stickers) > 1:
        return None
    name = _new_name(scene, rng)
    added = place((name, scene.stickers[0].name), rng)[0]  # of the size that one of two has
    return f"add {with_article(name)}", replace(scene, stickers=(*scene.stickers, added))


def _move(scene: Scene, rng: np.random.Generator) -> Changed:
    index, old = _pick(scene, rng)
    side = str(rng.choice(list(SIDES)))
    axis, sign = SIDES[side]
    away = old.size / 2 + float(rng.uniform(0, _MARGIN))
    center = away if sign < 0 else SIDE - away
    if sign * (center - getattr(old, axis)) < _FAR:
        return None
    moved = replace(old, x=center) if axis == "x" else replace(old, y=center)
    return f"move the {old.name} to the {side}", _with(scene, index, moved)


def _put(scene: Scene, rng: np.random.Generator) -> Changed:
    ground = str(rng.choice([name for name, said in GROUNDS.items() if said]))
    if ground == scene.ground:
        return None
    what = "it" if len(scene.stickers) == 1 else "them"
    return f"put {what} {GROUNDS[ground]}", replace(scene, ground=ground)


def _resize(scene: Scene, rng: np.random.Generator) -> Changed:
    index, old = _pick(scene, rng)
    larger = bool(rng.random() < 0.5)
    size = round(old.size * (_GROWTH if larger else 1 / _GROWTH))
    if not _SIZES[0] <= size <= _SIZES[1]:
        return None
    text = f"make the {old.name} {'larger' if larger else 'smaller'}"
    return text, _with(scene, index, replace(old, size=size))


_CHANGES: dict[str, Callable[[Scene, np.random.Generator], Changed]] = {
    "replace": _replace,
    "remove": _remove,
    "add": _add,
    "move": _move,
    "ground": _put,
    "size": _resize,
}
KINDS = tuple(_CHANGES)

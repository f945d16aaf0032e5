"""Instructions that change one thing of a scene, with the picture before and after.

An `Edit` is a scene, an instruction such as "make the ring green" and the scene that follows from
it. Both pictures are drawn from the same random numbers, so that every pixel the instruction does
not touch is the same in both, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffcache.pipelines.small.classifier import read, shows_all
from diffcache.pipelines.small.scenes import (
    COLORS,
    PLACES,
    SHAPES,
    SIZES,
    Figure,
    Scene,
    held_out,
    render,
    sample_scene,
)
from diffcache.psnr import psnr

KINDS = ("color", "background", "size", "shape", "remove")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a scene.

    Attributes:
        kind: One of `KINDS`.
        before: The scene of the reference picture.
        after: The scene that is asked for, its figures in the same order.
        index: Index of the changed figure in `before`; -1 when the background changes. A figure
            that is removed is the last one.
    """

    kind: str
    before: Scene
    after: Scene
    index: int


def sample_edit(rng: np.random.Generator, *, held: bool = False) -> Edit:
    """Draw an edit.

    Args:
        rng: Source of randomness.
        held: False for training: neither scene is held out; True for a held-out result.

    Returns:
        An edit after which every figure still differs in color from the background.
    """
    while True:
        edit = _draw(rng, sample_scene(rng, held=None if held else False))
        if edit is not None and held_out(edit.after) == held:
            return edit


def _draw(rng: np.random.Generator, scene: Scene) -> Edit | None:
    kind = str(rng.choice(KINDS))
    figures = list(scene.figures)
    index = int(rng.integers(len(figures)))
    chosen = figures[index]
    if kind == "background":
        taken = {scene.background, *(figure.color for figure in figures)}
        after = Scene(_other(rng, COLORS, taken), scene.figures)
        return Edit(kind, scene, after, -1)
    if kind == "remove":
        if len(figures) < 2:
            return None
        left = (figures[1 - index],)
        before = Scene(scene.background, (*left, chosen))
        return Edit(kind, before, Scene(scene.background, left), 1)
    if kind == "color":
        taken = {scene.background, chosen.color}
        figures[index] = replace(chosen, color=_other(rng, COLORS, taken))
    elif kind == "size":
        figures[index] = replace(chosen, size=_other(rng, SIZES, {chosen.size}))
    else:
        figures[index] = replace(chosen, shape=_other(rng, SHAPES, {chosen.shape}))
    return Edit(kind, scene, Scene(scene.background, tuple(figures)), index)


def _other(rng: np.random.Generator, names: Any, taken: set[str]) -> str:
    return str(rng.choice([name for name in names if name not in taken]))


def subjects(scene: Scene, figure: Figure) -> list[str]:
    """Return the noun phrases that mean this figure and no other of the scene, shortest first."""

    def alike(*names: str) -> int:
        return sum(
            all(getattr(other, n) == getattr(figure, n) for n in names) for other in scene.figures
        )

    phrases = []
    if alike("shape") == 1:
        phrases.append(f"the {figure.shape}")
    if alike("color", "shape") == 1:
        phrases.append(f"the {figure.color} {figure.shape}")
    if alike("size", "shape") == 1:
        phrases.append(f"the {figure.size} {figure.shape}")
    return [*phrases, f"the {figure.shape} {PLACES[figure.position]}"]


def instruction(edit: Edit, rng: np.random.Generator | None = None) -> str:
    """Write an edit as a sentence.

    Args:
        edit: Edit to write down.
        rng: Chooses among the phrasings; None takes the first and shortest.
    """

    def pick(options: Sequence[str]) -> str:
        return options[0] if rng is None else options[int(rng.integers(len(options)))]

    if edit.kind == "background":
        return f"{pick(('make', 'turn'))} the background {edit.after.background}"
    what = pick(subjects(edit.before, edit.before.figures[edit.index]))
    if edit.kind == "remove":
        return f"remove {what}"
    new = edit.after.figures[edit.index]
    if edit.kind == "color":
        return f"{pick(('make', 'turn'))} {what} {new.color}"
    if edit.kind == "size":
        return f"make {what} {new.size}"
    return pick((f"turn {what} into a {new.shape}", f"make {what} a {new.shape}"))


def render_pair(edit: Edit, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw the pictures before and after an edit, uint8 [64, 64, 3] each.

    Args:
        edit: Edit to draw.
        seed: Seed of the small differences in place, size and shade, the same in both pictures.
    """
    before = render(edit.before, np.random.default_rng(seed))
    return before, render(edit.after, np.random.default_rng(seed))


def draw_edits(count: int, seed: int, *, held: bool = False) -> tuple[list[Edit], Tensor, Tensor]:
    """Draw edits and their pictures.

    Args:
        count: Number of edits.
        seed: Seed of the draw.
        held: Whether the combinations of attributes are held-out ones.

    Returns:
        The edits and the pictures before and after, uint8 [B, 3, 64, 64] each.
    """
    rng = np.random.default_rng([seed, 8])
    edits = [sample_edit(rng, held=held) for _ in range(count)]
    pairs = [render_pair(edit, seed * 1_000_003 + i) for i, edit in enumerate(edits)]
    before, after = (
        torch.from_numpy(np.stack(side)).permute(0, 3, 1, 2).contiguous()
        for side in zip(*pairs, strict=True)
    )
    return edits, before, after


def target_shown(found: Scene, edit: Edit) -> bool:
    """Say whether a scene read from a picture has what the instruction asked for."""
    if edit.kind == "background":
        return found.background == edit.after.background
    place = edit.before.figures[edit.index].position
    seen = [figure for figure in found.figures if figure.position == place]
    if edit.kind == "remove":
        return not seen
    wanted = getattr(edit.after.figures[edit.index], edit.kind)
    return bool(seen) and getattr(seen[0], edit.kind) == wanted


def untouched_psnr(pictures: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the PSNR in dB [B] to the reference over what the edit does not touch, at most 100.

    Args:
        pictures: Drawn pictures, uint8 [B, 3, H, W].
        before: The reference pictures, the same shape and dtype.
        after: The pictures of the wanted scenes; a pixel that is equal in both is untouched.
    """
    untouched = (before == after).all(dim=1, keepdim=True)
    return psnr(pictures, before, mask=untouched)


def judge(
    pictures: Tensor, edits: Sequence[Edit], before: Tensor, after: Tensor
) -> dict[str, Tensor]:
    """Say how well each picture follows its instruction.

    Args:
        pictures: Drawn pictures, uint8 [B, 3, 64, 64].
        edits: Edits that were asked for.
        before: The reference pictures, uint8 [B, 3, 64, 64].
        after: The wanted pictures, uint8 [B, 3, 64, 64].

    Returns:
        [B] each: `whole_right`, whether the classifier reads the whole scene right, bool;
        `target_right`, whether it reads what the instruction asked for, bool; and
        `untouched_psnr_db` of what the edit does not touch, float64.
    """
    scenes = read(pictures)
    right = [target_shown(scene, edit) for scene, edit in zip(scenes, edits, strict=True)]
    whole = [shows_all(scene, edit.after) for scene, edit in zip(scenes, edits, strict=True)]
    return {
        "whole_right": torch.tensor(whole),
        "target_right": torch.tensor(right),
        "untouched_psnr_db": untouched_psnr(pictures, before, after),
    }

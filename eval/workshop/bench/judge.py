"""How many whole and how many broken objects the judge of the sticker models takes for whole.

Objects are drawn on grounds beside others, then bent, blurred and made noisy as decoders do, and
sought from a pose that is somewhat off, as the judge's network finds them. The bar of the likeness
was chosen on seed 1; the record is of seed 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from diffcache.eval.metrics.intervals import share_interval
from diffcache.eval.record import Setting, values
from diffcache.eval.workshop.small.sticker_judge import LEAST_LIKENESS, fit, likeness
from diffcache.eval.workshop.small.stickers import GROUNDS, OBJECTS, SIDE, Sticker, ground, place, put, to_bytes

KINDS = {
    "whole": "nothing",
    "half missing": "the ground shows on one side of a line through the middle",
    "a quarter missing": "the ground shows where the fourth part of it is",
    "shattered": "2 x 2 or 3 x 3 tiles exchange their places",
    "doubled": "one half of it stands a second time beside it",
    "other colors": "red, green and blue exchange their places",
    "another object": "it is not the one that is sought",
}
Pixels = NDArray[np.float64]


def draw(kind: str, rng: np.random.Generator) -> tuple[Sticker, NDArray[np.uint8]]:
    """Draw an object with a fault of a kind: the object that is sought, and the picture, uint8 [64, 64, 3]."""
    names = tuple(str(name) for name in rng.choice(OBJECTS, 2, replace=False))
    wanted, *others = place(names[: 1 + int(rng.random() < 0.75)], rng)
    behind = ground(str(rng.choice(list(GROUNDS))), int(rng.integers(1 << 31)))
    for other in others:
        behind, _ = put(behind, other)
    if kind == "another object":
        name = str(rng.choice([each for each in OBJECTS if each != wanted.name]))
        return wanted, soften(put(behind, replace(wanted, name=name))[0], rng)
    picture, cover = put(behind, wanted)
    return wanted, soften(_fault(kind, picture, behind, cover, rng), rng)


def _fault(kind: str, picture: Pixels, behind: Pixels, cover: Pixels, rng: np.random.Generator) -> Pixels:
    rows, columns = np.nonzero(cover > 0.5)
    angle, grid = rng.uniform(0, 2 * np.pi), np.arange(SIDE)
    along = (grid - columns.mean()) * np.cos(angle) + (grid[:, None] - rows.mean()) * np.sin(angle)
    if kind.endswith("missing"):
        share = 0.5 if kind == "half missing" else 0.75
        gone = along > np.quantile(along[cover > 0.5], share)
        return np.where(gone[..., None], behind, picture)
    if kind == "doubled":
        width = float(np.ptp(along[cover > 0.5])) * 0.5
        step = (round(width * np.sin(angle)), round(width * np.cos(angle)))
        again = np.roll(cover * (along > 0), step, (0, 1))[..., None]
        return np.asarray(picture * (1 - again) + np.roll(picture, step, (0, 1)) * again)
    if kind == "other colors":
        return np.where(cover[..., None] > 0.3, picture[..., [1, 2, 0]], picture)
    if kind == "shattered":
        count = int(rng.integers(2, 4))
        high, wide = np.ptp(rows) // count, np.ptp(columns) // count
        corners = [(rows.min() + i * high, columns.min() + j * wide) for i in range(count) for j in range(count)]
        order, broken = rng.permutation(len(corners)), picture.copy()
        for one, other in zip(order, np.roll(order, 1), strict=True):
            (y, x), (v, u) = corners[one], corners[other]
            broken[y : y + high, x : x + wide] = picture[v : v + high, u : u + wide]
        return np.asarray(broken)
    return picture


def soften(picture: Pixels, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Bend a picture by up to some pixels, blur it, and add noise."""
    random = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    bend = functional.interpolate(torch.randn(1, 2, 7, 7, generator=random), size=(SIDE, SIDE), mode="bicubic")
    bend = bend / bend.std() * rng.uniform(0, 1.6) * 2 / SIDE
    plain = functional.affine_grid(torch.eye(2, 3)[None], [1, 3, SIDE, SIDE], align_corners=False)
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
    bent = functional.grid_sample(pixels, plain + bend.permute(0, 2, 3, 1), padding_mode="border", align_corners=False)
    share = rng.uniform(0, 0.25)  # of the neighbors on both sides
    kernel = torch.tensor([share, 1 - 2 * share, share])
    kernel = torch.outer(kernel, kernel).expand(3, 1, 3, 3)
    padded = functional.pad(bent, (1, 1, 1, 1), mode="replicate")
    blurred = functional.conv2d(padded, kernel, groups=3)
    noise = rng.uniform(0, 8) * torch.randn(blurred.shape, generator=random)
    return to_bytes((blurred + noise)[0].permute(1, 2, 0).double().numpy())


def likenesses(kind: str, numbers: Sequence[int], seed: int) -> NDArray[np.float64]:
    """Return the likeness of objects of a kind, each drawn by its number, [N]."""
    found = []
    for number in numbers:
        rng = np.random.default_rng([seed, list(KINDS).index(kind), number])
        sticker, picture = draw(kind, rng)
        guess = replace(
            sticker,
            x=sticker.x + rng.uniform(-1.5, 1.5),
            y=sticker.y + rng.uniform(-1.5, 1.5),
            size=sticker.size + int(rng.integers(-2, 3)),
            tilt=sticker.tilt + rng.uniform(-6, 6),
            light=1.0,
        )
        found.append(likeness(fit(guess, picture)[0], picture))
    return np.array(found)


def measure(setting: Setting, *, samples: int = 200, seed: int = 0) -> dict[str, Any]:
    """Measure on the CPU how many of `samples` objects of every kind the judge takes for whole."""
    rows = []
    for number, (kind, about) in enumerate(KINDS.items()):
        setting.progress(number, len(KINDS), kind)
        found = likenesses(kind, range(samples), seed)
        taken = torch.from_numpy(found >= LEAST_LIKENESS)
        cuts = np.quantile(found, (0.05, 0.5, 0.95)).round(3).tolist()
        rows.append(
            dict(name=kind, about=about, taken=share_interval(taken).to_dict(), likeness=cuts, values=values(taken))
        )
    return {
        "shapes": {"device": "cpu", "least_likeness": LEAST_LIKENESS, "samples": samples},
        "rounds": 1,
        "seed": seed,
        "rows": rows,
    }

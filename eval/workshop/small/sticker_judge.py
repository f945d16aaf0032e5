"""The judge of the sticker models: the objects of a picture, their places, and if they are whole.

A small convolutional network finds objects and their pose, and tells the ground. Each object is
then drawn again in the pose that fits best and compared with the picture part by part, so that one
that is broken, or of wrong colors, does not count. `python -m diffcache.eval.workshop.bench judge`
measures how many whole and broken objects it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.eval.workshop.small.sticker_autoencoder import HELD, draw_pictures, load_autoencoder, to_unit
from diffcache.eval.workshop.small.stickers import (
    GROUNDS,
    OBJECTS,
    SIDE,
    Scene,
    Sticker,
    caption,
    layer,
    parse,
    sample_scene,
    true_relations,
)
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-judge"
# On seed 1 of the bench `judge` 56 of 60 whole objects reach it, and 2 of 60 of which half is gone;
# of 0.5, 0.6 and 0.7 it agrees most with a person on 64 pictures of sticker-flux.
LEAST_LIKENESS = 0.6
_CELL = 4
_GRID = 16
_POSE = 6  # place in the cell (2), size, sine and cosine of the tilt, mirrored
_LARGEST = 46.0
_SMALLEST = 18
_SHIFT = 2
_FLOOR = 0.05  # of errors in a logarithm
_BETTER = 0.15  # weight of how much better the ground explains a part
_GROUND_NAMES = tuple(GROUNDS)


class Judge(nn.Module):
    """A detector on a grid of 16 x 16 cells, each of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 5, 2, 2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        )
        self.blocks = nn.ModuleList(_Residual(64, dilation) for dilation in (1, 2, 4, 1, 2))
        self.objects = nn.Conv2d(64, len(OBJECTS), 1)
        self.pose = nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, _POSE, 1))
        self.ground = nn.Linear(64, len(GROUNDS))
        assert self.objects.bias is not None
        nn.init.constant_(self.objects.bias, -5.0)  # few cells hold the center of an object

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Look at pictures in [-1, 1], float32 [B, 3, 64, 64].

        Returns:
            Logits of objects [B, 24, 16, 16], poses [B, 6, 16, 16], logits of grounds [B, 8].
        """
        states = self.stem(pictures)
        for block in self.blocks:
            states = block(states)
        return self.objects(states), self.pose(states), self.ground(states.mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, states: Tensor) -> Tensor:
        return functional.relu(states + self.change(states))


@dataclass(frozen=True)
class Reading:
    """Objects and ground that a picture shows.

    Attributes:
        stickers: Objects that were found whole, in the pose that fits best.
        broken: Names of objects that were found, do not look like their drawing, and are no part
            of a whole one.
        ground: One of `GROUNDS`.
    """

    stickers: tuple[Sticker, ...]
    broken: tuple[str, ...]
    ground: str


def load(directory: Path = DIRECTORY) -> Judge:
    """Load the shipped judge."""
    judge = Judge()
    judge.load_state_dict(load_file(directory / "model.safetensors"))
    return judge.eval().requires_grad_(False)


@torch.no_grad()
def read(judge: Judge, pictures: NDArray[np.uint8]) -> list[Reading]:
    """Read pictures, uint8 [N, 64, 64, 3]."""
    readings = []
    for part in torch.from_numpy(pictures).split(64):
        logits, poses, grounds = judge(to_unit(part))
        scores = logits.sigmoid()
        peaks = scores == functional.max_pool2d(scores.amax(1, keepdim=True), 5, 1, 2)
        for index, picture in enumerate(part.numpy()):
            found = torch.nonzero(peaks[index] & (scores[index] > 0.35)).tolist()
            guesses = [
                _sticker(OBJECTS[kind], poses[index, :, row, column], row, column) for kind, row, column in found
            ]
            fitted = [fit(guess, picture)[0] for guess in guesses]
            whole = tuple(one for one in fitted if likeness(one, picture) >= LEAST_LIKENESS)
            rest = [one for one in fitted if not any(one is each for each in whole)]
            broken = tuple(one.name for one in rest if not any(_meet(one, w) for w in whole))
            ground = _GROUND_NAMES[int(grounds[index].argmax())]
            readings.append(Reading(whole, broken, ground))
    return readings


def _meet(one: Sticker, other: Sticker) -> bool:
    """Tell whether the center of an object lies well within another, so that both are one."""
    return bool(np.hypot(one.x - other.x, one.y - other.y) < other.size / 2)


def _sticker(name: str, pose: Tensor, row: int, column: int) -> Sticker:
    across, down, size, sine, cosine, mirrored = pose.tolist()
    return Sticker(
        name,
        x=_CELL * (column + across),
        y=_CELL * (row + down),
        size=int(np.clip(round(size * _LARGEST), 14, 54)),
        tilt=float(np.degrees(np.arctan2(sine, cosine))),
        mirrored=mirrored > 0.5,
        light=1.0,
    )


def correlation(sticker: Sticker, picture: NDArray[np.uint8]) -> float:
    """Return the correlation of colors with those of an object in a pose, -1 to 1.

    It is over all color values of the pixels that the drawing covers, so light does not matter.

    Args:
        sticker: Object in a pose.
        picture: Picture, uint8 [64, 64, 3].
    """
    color, cover = layer(sticker)
    inside = cover > 0.6
    if inside.sum() < 20:
        return 0.0
    drawn = color[inside].ravel()
    shown = picture[inside].astype(np.float64).ravel()
    drawn, shown = drawn - drawn.mean(), shown - shown.mean()
    scale = np.sqrt((drawn @ drawn) * (shown @ shown))
    return float(drawn @ shown / scale) if scale > 0 else 0.0


def likeness(sticker: Sticker, picture: NDArray[np.uint8]) -> float:
    """Return how much the least like part of a picture looks like an object in a pose.

    Parts are overlapping squares of about a third of the object's size. Each may be two pixels off
    its place, and colors may be brighter or paler in all, so that what is blurred or bent a little
    is still like its drawing. The error of a part is the mean square of color differences over the
    variance of the object's colors; the more the ground around explains a part better than the
    drawing does, the more it counts as missing.

    Args:
        sticker: Object in the pose that fits best.
        picture: Picture, uint8 [64, 64, 3].

    Returns:
        1 less the error of the worst part, dimensionless, above 1 where the ground is far from all
        parts; -inf where hardly any of it is shown.
    """
    color, cover = layer(sticker)
    inside = (cover > 0.6).astype(np.float64)
    if inside.sum() < 20:
        return -np.inf
    shown = _blur(picture.transpose(2, 0, 1).astype(np.float64), 0.7)
    drawn = _blur(color.transpose(2, 0, 1) * cover, 0.7) / np.maximum(_blur(cover, 0.7), 1e-3)
    off, mean = drawn - drawn[:, inside > 0].mean(), shown[:, inside > 0].mean()
    spread = (off**2 * inside).sum()
    gain = np.clip((off * (shown - mean) * inside).sum() / max(spread, 1e-9), 0.5, 1.3)
    variance = gain**2 * spread / (3 * inside.sum())
    far = (_square(4) @ (cover > 0.3) @ _square(4) == 0).astype(np.float64)
    ground = _blur(shown * far, 4) / np.maximum(_blur(far, 4), 1e-6)
    padded = np.pad(shown, ((0, 0), (_SHIFT, _SHIFT), (_SHIFT, _SHIFT)), mode="edge")
    guesses = [padded[:, y : y + SIDE, x : x + SIDE] for y, x in _SHIFTS]
    errors = [((guess - mean - gain * off) ** 2).mean(0) for guess in guesses]
    errors.append(((shown - ground) ** 2).mean(0))
    square = _square(round(0.15 * sticker.size))
    area = square @ inside @ square
    parts = area >= 0.45 * min(square[SIDE // 2].sum() ** 2, inside.sum())
    sums = (square @ (np.stack(errors) * inside) @ square)[:, parts] / area[parts] / variance
    error, of_ground = sums[:-1].min(0), sums[-1]
    better = np.log((error + _FLOOR) / (of_ground + _FLOOR))
    return float(1 - (error + _BETTER * better).max())


_SHIFTS = [
    (_SHIFT + y, _SHIFT + x)
    for y in range(-_SHIFT, _SHIFT + 1)
    for x in range(-_SHIFT, _SHIFT + 1)
    if x * x + y * y <= _SHIFT**2 + 1
]


def _blur(values: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    weights = _bell(sigma)
    return np.asarray(weights @ values @ weights.T)


@cache
def _bell(sigma: float) -> NDArray[np.float64]:
    """Return the matrix that blurs along an axis, [64, 64]."""
    weights = np.exp(-0.5 * (_APART / sigma) ** 2)
    return np.asarray(weights / weights.sum(1, keepdims=True))


@cache
def _square(reach: int) -> NDArray[np.float64]:
    """Return the matrix that sums along an axis as far as `reach` pixels to both sides."""
    return (np.abs(_APART) <= reach).astype(np.float64)


_APART = np.subtract.outer(np.arange(SIDE), np.arange(SIDE))


def fit(sticker: Sticker, picture: NDArray[np.uint8]) -> tuple[Sticker, float]:
    """Move an object step by step to where its colors correlate most with a picture's.

    Its size stays within a fifth of what it was and at least as large as objects are drawn, as a
    small drawing fits into a fragment of many a large one.

    Args:
        sticker: Object in about the pose that it is shown in.
        picture: Picture, uint8 [64, 64, 3].

    Returns:
        The object in the best pose found, and its correlation there, dimensionless.
    """
    least, most = max(_SMALLEST, round(0.8 * sticker.size)), round(1.2 * sticker.size)
    sticker = replace(sticker, size=max(sticker.size, least))
    poses = [sticker, replace(sticker, mirrored=not sticker.mirrored)]
    values = [correlation(pose, picture) for pose in poses]
    best, value = max(zip(poses, values, strict=True), key=lambda one: one[1])
    for reach in (2.0, 1.0, 0.5):
        for _ in range(5):
            tries = [
                replace(
                    best,
                    x=best.x + dx,
                    y=best.y + dy,
                    tilt=best.tilt + turn,
                    size=int(np.clip(best.size + grow, least, max(least, most))),
                )
                for dx, dy, grow, turn in _MOVES * np.array([reach, reach, max(1, round(reach)), 6 * reach])
            ]
            values = [correlation(one, picture) for one in tries]
            place = int(np.argmax(values))
            if values[place] <= value:
                break
            best, value = tries[place], values[place]
    return best, value


_MOVES = np.concatenate([np.eye(4), -np.eye(4)])


def faults(text: str, reading: Reading) -> list[str]:
    """Return what is wrong with a picture of a sentence; none if all it says is there.

    Args:
        text: Sentence as `stickers.caption` writes it.
        reading: What the picture shows.
    """
    names, relation, ground = parse(text)
    shown = [sticker.name for sticker in reading.stickers]
    wrong = [f"no {name}" for name in names if name not in shown]
    wrong += [f"a broken {name}" for name in reading.broken]
    extra = [name for name in shown if name not in names]
    extra += [name for name in set(names) for _ in range(shown.count(name) - 1)]
    wrong += [f"also a {name}" for name in extra]
    if relation and set(names) <= set(shown):
        one, other = (next(s for s in reading.stickers if s.name == name) for name in names)
        if relation not in true_relations(one, other):
            wrong.append(f"not {relation}")
    if ground and reading.ground != ground:
        wrong.append(f"on {reading.ground}, not {ground}")
    return wrong


def read_faults(texts: list[str], pictures: NDArray[np.uint8]) -> list[list[str]]:
    """Return what is wrong with each picture, by the shipped judge.

    Args:
        texts: Sentences as `stickers.caption` writes them.
        pictures: Their pictures, uint8 [N, 64, 64, 3].
    """
    readings = read(load(), pictures)
    return [faults(text, reading) for text, reading in zip(texts, readings, strict=True)]


def right(pictures: Tensor, prompts: Sequence[str]) -> Tensor:
    """Reward pictures that are right in everything with 1, others with 0, float64 [N].

    Args:
        pictures: uint8 [N, 3, 64, 64].
        prompts: Sentences as `stickers.caption` writes them.
    """
    shown = pictures.permute(0, 2, 3, 1).cpu().contiguous().numpy()
    wrong = read_faults(list(prompts), shown)
    return torch.tensor([float(not faults) for faults in wrong], dtype=torch.float64)


class JudgeJob(Job):
    """Train the judge on scenes, half of them as the autoencoder gives them back.

    The folder holds `sticker-autoencoder.state`.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        seed = settings.seed
        self.pictures = draw_pictures(folder / "pictures.npz", settings.examples, seed + 1, held=False)[0]
        rng = np.random.default_rng(seed + 1)
        self.targets = [targets(sample_scene(rng)) for _ in range(settings.examples)]
        held = np.random.default_rng(seed + 2)
        self.held_scenes = [sample_scene(held, held=True) for _ in range(HELD)]
        self.held = draw_pictures(folder / "held.npz", HELD, seed + 2, held=True)[0]
        self.rebuilt = self._rebuild(self.pictures[: settings.examples // 2])
        self.held_rebuilt = self._rebuild(self.held)

    @torch.no_grad()
    def _rebuild(self, pictures: Tensor) -> Tensor:
        path = self.folder / f"rebuilt-{len(pictures)}.pt"
        if not path.exists():
            model = load_autoencoder(self.folder / "sticker-autoencoder.state")
            parts = [model.decode(model.encode(to_unit(part)).latent_dist.mean).sample for part in pictures.split(100)]
            made = ((torch.cat(parts).clamp(-1, 1) + 1) * 127.5).round().byte()
            torch.save(made.permute(0, 2, 3, 1).contiguous(), path)
        rebuilt: Tensor = torch.load(path, weights_only=True)
        return rebuilt

    def build(self) -> nn.ModuleDict:
        """Build the network."""
        return nn.ModuleDict({"judge": Judge()})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return errors of objects, poses and ground, on pictures with noise and of other light."""
        chosen = drawn["chosen"]
        halves = (chosen < len(self.rebuilt)) & (torch.rand(len(chosen), generator=generator) < 0.7)
        shown = torch.where(
            halves[:, None, None, None], self.rebuilt[chosen.clamp_max(len(self.rebuilt) - 1)], self.pictures[chosen]
        )
        pictures = to_unit(shown)
        light = 1 + 0.15 * torch.randn(len(chosen), 3, 1, 1, generator=generator)
        noise = 0.06 * torch.rand(len(chosen), 1, 1, 1, generator=generator)
        pictures = pictures * light + noise * torch.randn(pictures.shape, generator=generator)
        logits, poses, grounds = models["judge"](pictures.contiguous(memory_format=torch.channels_last))
        heat, wanted, places, ground = (
            torch.stack(parts) for parts in zip(*(self.targets[i] for i in chosen), strict=True)
        )
        share = logits.sigmoid()
        error: Tensor = functional.binary_cross_entropy_with_logits(logits, heat, reduction="none")
        # Easy cells count less (the focal loss), as nearly all of them are empty.
        error = (error * (heat - share).abs().square()).sum() / len(chosen)
        off = ((poses - wanted).abs() * places[:, None]).sum() / places.sum()
        loss: Tensor = error + 2 * off + functional.cross_entropy(grounds, ground)
        return loss

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save the network in float32."""
        save_file(models["judge"].state_dict(), directory / "model.safetensors")

    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the share of held-out scenes read without a fault, as drawn and as decoded."""
        judge = models["judge"]
        assert isinstance(judge, Judge)
        shares = {}
        for name, pictures in (("drawn", self.held), ("decoded", self.held_rebuilt)):
            readings = read(judge, pictures.numpy())
            right = [not faults(full(s), r) for s, r in zip(self.held_scenes, readings, strict=True)]
            shares[name] = sum(right) / len(right)
        return shares


def full(scene: Scene) -> str:
    """Write a scene as the sentence that says all it can."""
    relation = ""
    if len(scene.stickers) == 2:
        relation = (true_relations(*scene.stickers) or [""])[0]
    return caption(replace(scene, relation=relation, says_ground=scene.ground != "gradient"))


def targets(scene: Scene) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return heat [24, 16, 16], poses [6, 16, 16], cells that have one [16, 16], and the ground."""
    heat = torch.zeros(len(OBJECTS), _GRID, _GRID)
    pose = torch.zeros(_POSE, _GRID, _GRID)
    places = torch.zeros(_GRID, _GRID)
    for sticker in scene.stickers:
        column, row = (min(int(place // _CELL), _GRID - 1) for place in (sticker.x, sticker.y))
        kind = OBJECTS.index(sticker.name)
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                i, j = row + down, column + across
                if not (0 <= i < _GRID and 0 <= j < _GRID):
                    continue
                away = np.hypot(sticker.y / _CELL - i - 0.5, sticker.x / _CELL - j - 0.5)
                if (down, across) != (0, 0):
                    heat[kind, i, j] = max(float(heat[kind, i, j]), float(np.exp(-2 * away**2)) * 0.6)
                places[i, j] = 1.0
                tilt = np.radians(sticker.tilt)
                pose[:, i, j] = torch.tensor(
                    [
                        sticker.x / _CELL - j,
                        sticker.y / _CELL - i,
                        sticker.size / _LARGEST,
                        np.sin(tilt),
                        np.cos(tilt),
                        float(sticker.mirrored),
                    ]
                )
        heat[kind, row, column] = 1.0
    return heat, pose, places, torch.tensor(_GROUND_NAMES.index(scene.ground))

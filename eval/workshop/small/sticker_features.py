"""The extractor behind the offline `-lite` metrics: how it is trained, and its reference.

`corrupt` puts artefacts that caches, few steps and small decoders leave into pictures, in known
strengths. The extractor learns what stands on which ground, and which artefact was put into a picture
how strongly. `python -m diffcache.eval.workshop.lite_card` then measures what the features see, with
the same artefacts, and writes the model card.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.metrics import lite
from diffcache.eval.metrics.lite import Extractor, film_statistics, in_batches
from diffcache.eval.workshop.small.job import Job, Settings, spread
from diffcache.eval.workshop.small.sticker_films import render_film, sample_film
from diffcache.eval.workshop.small.stickers import GROUNDS, OBJECTS, Scene, draw_scenes, render
from diffcache.files import write_file, write_json

RANGES = {
    "blur": (0.04, 1.0),
    "noise": (0.004, 0.1),
    "ghost": (0.03, 0.5),
    "echo": (0.04, 0.5),
    "patch": (0.004, 0.08),
    "color": (0.02, 0.3),
    "grid": (0.003, 0.05),
}
"""Least and greatest strength of each kind in training; `corrupt` says what a strength is."""


def corrupt(pictures: Tensor, kind: str, strength: float | Tensor, seed: int = 0) -> Tensor:
    """Put one kind of artefact into pictures and round them to eight bits again.

    | kind   | artefact                                           | strength                       |
    |--------|----------------------------------------------------|--------------------------------|
    | blur   | mixture with a Gaussian blur of 1.5 pixels         | share of the blurred picture   |
    | noise  | independent Gaussian noise                         | standard deviation             |
    | ghost  | mixture with the previous picture of the batch     | share of the other picture     |
    | echo   | mixture with a copy shifted by up to 6 pixels      | share of the copy              |
    | patch  | an offset for every patch of 4 or 8 pixels         | standard deviation             |
    | color | contrast and gain of each channel                  | greatest change of the factors |
    | grid   | checkerboard, or lines every 4 or 8 pixels         | amplitude                      |

    Args:
        pictures: uint8 [N, 3, H, W].
        kind: One of `RANGES`.
        strength: Dimensionless, where offsets and amplitudes are shares of the full range of 255;
            one number, or float [N].
        seed: Seed of the random parts.

    Returns:
        Pictures, uint8 [N, 3, H, W].

    Raises:
        ValueError: If the kind is unknown, or a ghost is asked for in a single picture.
    """
    if kind not in _MAKERS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(_MAKERS)}")
    if kind == "ghost" and len(pictures) < 2:
        raise ValueError(f"a ghost mixes two pictures; got {len(pictures)}, pass at least 2")
    generator = torch.Generator().manual_seed(seed)
    amount = torch.as_tensor(strength, dtype=torch.float32).reshape(-1, 1, 1, 1)
    changed = _MAKERS[kind](pictures.float() / 255, amount, generator)
    return (255 * changed).round().clamp(0, 255).to(torch.uint8)


def _blur(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    taps = torch.exp(-0.5 * (torch.arange(-4.0, 5.0) / 1.5) ** 2)
    taps = (taps / taps.sum()).reshape(1, 1, 1, -1).expand(3, 1, 1, -1)
    padded = functional.pad(pictures, (4, 4, 4, 4), mode="replicate")
    rows = functional.conv2d(padded, taps, groups=3)
    return torch.lerp(pictures, functional.conv2d(rows, taps.mT, groups=3), amount)


def _noise(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    return pictures + amount * torch.randn(pictures.shape, generator=generator)


def _ghost(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    return torch.lerp(pictures, pictures.roll(1, 0), amount)


def _echo(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    count, _, height, width = pictures.shape
    size = torch.randint(2, 6 + 1, (2, count, 1), generator=generator)
    sign = 2 * torch.randint(0, 2, (2, count, 1), generator=generator) - 1
    down, right = size * sign
    rows = (torch.arange(height) + down).clamp(0, height - 1)[:, :, None]
    columns = (torch.arange(width) + right).clamp(0, width - 1)[:, None, :]
    shifted = pictures.movedim(1, -1)[torch.arange(count)[:, None, None], rows, columns]
    return torch.lerp(pictures, shifted.movedim(-1, 1), amount)


def _patch(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    count, channels, height, width = pictures.shape
    offsets = torch.empty_like(pictures)
    for first, edge in ((0, 4), (1, 8)):
        grid = (len(range(first, count, 2)), channels, -(-height // edge), -(-width // edge))
        fine = torch.randn(grid, generator=generator)
        fine = fine.repeat_interleave(edge, 2).repeat_interleave(edge, 3)
        offsets[first::2] = fine[:, :, :height, :width]
    return pictures + amount * offsets


def _color(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    factors = 1 + amount * (2 * torch.rand(len(pictures), 4, 1, 1, generator=generator) - 1)
    middle = pictures.mean(dim=(1, 2, 3), keepdim=True)
    return (middle + (pictures - middle) * factors[:, :1]) * factors[:, 1:]


def _grid(pictures: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    rows = torch.arange(pictures.shape[2])[:, None]
    columns = torch.arange(pictures.shape[3])[None, :]
    patterns = [1.0 - 2.0 * ((rows + columns) % 2)]
    for edge in (4, 8):
        patterns.append(((rows % edge == 0) | (columns % edge == 0)).float())
    chosen = torch.randint(0, len(patterns), (len(pictures),), generator=generator)
    return pictures + amount * torch.stack(patterns)[chosen][:, None]


_MAKERS: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "blur": _blur,
    "noise": _noise,
    "ghost": _ghost,
    "echo": _echo,
    "patch": _patch,
    "color": _color,
    "grid": _grid,
}

PART = 128  # pictures that are disturbed at once
WHITENING = 0.5
HELD = 512  # pictures that are measured on the way
REFERENCE, REFERENCE_SEED = 10_000, 41
KEPT = 2_000
FILMS, FILMS_SEED, FRAMES = 1_024, 42, 17
COMPONENTS = 64

_KINDS = ("clean", *RANGES)
_GROUNDS = tuple(GROUNDS)
_ANSWERS = [len(OBJECTS), len(GROUNDS), len(_KINDS), 1]


def draw(count: int, seed: int, *, held: bool = False) -> tuple[list[Scene], Tensor]:
    """Draw scenes and their pictures, uint8 [N, 3, 64, 64], each scene from a seed of its own."""
    scenes = draw_scenes(count, seed, held=held)
    pictures = np.stack(list(spread(render, scenes)))
    return scenes, torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def draw_films(count: int, seed: int) -> list[Tensor]:
    """Draw films of held-out combinations, each uint8 [17, 3, 64, 64]."""
    return list(spread(partial(_film, seed), range(count)))


def _film(seed: int, number: int) -> Tensor:
    rng = np.random.default_rng([seed, number])
    film = sample_film(rng, held=True, objects=OBJECTS)
    return torch.from_numpy(render_film(film, FRAMES)[0]).permute(0, 3, 1, 2).contiguous()


class Features(Job):
    """Train the extractor on scenes and artefacts at once."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        scenes, self.pictures = draw(settings.examples + HELD, settings.seed + 40)
        self.objects, self.grounds = targets(scenes)

    def build(self) -> nn.ModuleDict:
        """Build the extractor, and the answers it has to give from features alone.

        They are linear, so that what changes must move the features themselves.
        """
        answers = nn.Linear(lite.DIMENSIONS, sum(_ANSWERS))
        return nn.ModuleDict({"extractor": Extractor(), "answers": answers})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the error of all answers about disturbed pictures."""
        return sum(self._errors(models, drawn["chosen"], generator).values(), torch.zeros(()))

    def _errors(self, models: nn.ModuleDict, chosen: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the weighted parts of the loss, 0-d each."""
        model = models["extractor"]
        assert isinstance(model, Extractor)
        objects, grounds = self.objects[chosen], self.grounds[chosen]
        changed, kinds, severities = disturb(self.pictures[chosen], generator)
        maps = [level.float() for level in model.maps(lite.to_unit(changed))]
        named, ground, kind, severity = models["answers"](model.raw(maps)).split(_ANSWERS, 1)
        return {
            "objects_of_map": functional.cross_entropy(model.classes(maps[-1]), objects),
            "objects": functional.cross_entropy(named, objects),
            "ground": functional.cross_entropy(ground, grounds),
            "artefact": functional.cross_entropy(kind, kinds),
            "severity": 3 * functional.mse_loss(severity[:, 0], severities),
        }

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the parts of the loss on pictures that are not trained on, under artefacts."""
        chosen = torch.arange(self.settings.examples, len(self.pictures))
        generator = torch.Generator().manual_seed(self.settings.seed + 1)
        return {k: float(v) for k, v in self._errors(models, chosen, generator).items()}

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save the extractor in float16, and the reference, with `config.json` that names them."""
        model = models["extractor"]
        assert isinstance(model, Extractor)
        standardize(model.requires_grad_(False), self.pictures[:4000], self.settings.seed)
        weights = {name: value.half() for name, value in model.state_dict().items()}
        record = {
            "model": directory.name,
            "seed": self.settings.seed,
            "pictures": self.settings.examples,
            "steps": self.settings.steps,
            "sha256": save(directory, "model.safetensors", weights),
            "reference_sha256": "",
        }
        write_json(directory / "config.json", record, indent=2)
        # The reference is of the stored, rounded weights.
        record["reference_sha256"] = save(directory, "reference.safetensors", reference(lite.load(directory)))
        write_json(directory / "config.json", record, indent=2)


def targets(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Return shares of the objects of scenes, float32 [N, 24], and numbers of their grounds [N]."""
    shares = torch.zeros(len(scenes), len(OBJECTS))
    for row, scene in enumerate(scenes):
        for sticker in scene.stickers:
            shares[row, OBJECTS.index(sticker.name)] = 1 / len(scene.stickers)
    return shares, torch.tensor([_GROUNDS.index(scene.ground) for scene in scenes])


def disturb(pictures: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Leave a quarter of a batch clean and put one kind of artefact into each of the others.

    Args:
        pictures: uint8 [B, 3, 64, 64].
        generator: Generator of kinds, strengths (even on a logarithmic scale) and artefacts.

    Returns:
        Pictures, uint8 [B, 3, 64, 64]; kinds [B], 0 for clean; severities [B], the root of the
        strength as a share of the greatest.
    """
    count = len(pictures)
    clean = count // 4
    kinds = torch.arange(count - clean) % len(RANGES) + 1
    kinds = torch.cat([torch.zeros(clean, dtype=torch.long), kinds])
    share = torch.rand(count, generator=generator)
    changed, severities = pictures.clone(), torch.zeros(count)
    for number, (kind, (least, greatest)) in enumerate(RANGES.items(), start=1):
        rows = (kinds == number).nonzero()[:, 0]
        strength = least * (share[rows] * math.log(greatest / least)).exp()
        seed = int(torch.randint(2**31, (), generator=generator))
        changed[rows] = corrupt(pictures[rows], kind, strength, seed)
        severities[rows] = (strength / greatest).sqrt()
    return changed, kinds, severities


@torch.no_grad()
def standardize(model: Extractor, pictures: Tensor, seed: int) -> None:
    """Balance the features and bring those of clean pictures to mean 0 and deviation 1.

    Training makes artefacts move the features far more than another scene does. A linear map, the
    covariance of a mixture of clean and disturbed pictures to the power of minus a quarter
    (half-way to whitening), evens that out; it is folded into the last layers.

    Args:
        model: Extractor, changed in place.
        pictures: uint8 [N, 3, 64, 64], clean.
        seed: Seed of the artefacts.
    """
    generator = torch.Generator().manual_seed(seed)
    mixture = torch.cat([disturb(part, generator)[0] for part in pictures.split(PART)])
    values, vectors = torch.linalg.eigh(torch.cov(in_batches(model, mixture).double().T))
    even = (vectors * values.clamp_min(1e-4 * values[-1]) ** (-WHITENING / 2)) @ vectors.T
    for layer in (model.pooled, model.placed):
        layer.weight.copy_(even @ layer.weight.double())
    model.pooled.bias.copy_(even @ model.pooled.bias.double())
    found = in_batches(model, pictures)
    model.center.copy_(found.mean(0))
    model.scale.copy_(found.std(0).mean())


def reference(extractor: Extractor) -> dict[str, Tensor]:
    """Measure real pictures and films of combinations that were never trained on.

    Returns:
        Tensors that `lite.load_reference` describes.
    """
    found = in_batches(extractor, draw(REFERENCE, REFERENCE_SEED, held=True)[1]).double()
    films = draw_films(FILMS, FILMS_SEED)
    clips = torch.stack([film_statistics(in_batches(extractor, film)) for film in films]).double()
    center, scale = clips.mean(0), clips.std(0).clamp_min(1e-6)
    # The eigenvectors of the correlations, greatest first.
    components = torch.linalg.eigh(torch.corrcoef(clips.T))[1].flip(1)[:, :COMPONENTS]
    reduced = (clips - center) / scale @ components
    return {
        "mean": found.mean(0),
        "cov": torch.cov(found.T),
        "count": torch.tensor(len(found), dtype=torch.float64),
        "features": found[:KEPT].half(),
        "film_center": center.float(),
        "film_scale": scale.float(),
        "film_components": components.float().contiguous(),
        "film_mean": reduced.mean(0),
        "film_cov": torch.cov(reduced.T),
        "film_count": torch.tensor(len(reduced), dtype=torch.float64),
    }


def save(out: Path, name: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors in one go and return the file's sha256."""
    content: bytes = to_bytes({key: value.contiguous() for key, value in tensors.items()})
    write_file(out / name, content)
    return hashlib.sha256(content).hexdigest()

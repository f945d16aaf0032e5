"""The offline stand-ins: the `-lite` metrics, on the project's own features.

The features come from a small network trained on pictures of stickers and on artefacts, the shipped
`sticker-features`. Their numbers are comparable among themselves only: FID-lite is not FID, and so
on for each. Pictures of another size than 64x64 are resized by antialiased bilinear interpolation;
work is done in batches of 32 pictures, in float32, on the device that they are on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.metrics.distances import Moments
from diffcache.eval.metrics.pixels import check_pairs, check_pictures
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-features"
DIMENSIONS, CLASSES, SIZE = 64, 24, 64
WIDTHS = (16, 32, 64, 96)
# Larger ones take twice as long: their activations no longer fit what the allocator keeps.
BATCH = 32
_EDGE = 4


class LiteReference(NamedTuple):
    """Statistics of real, held-out pictures and films.

    `moments` are of the features of 10,000 pictures, `features` those of the first 2,000 of them, float32 [2000, 64]
    (stored in half precision), and `films` the moments of `clip_features` of 1,024 films of 17 frames.
    """

    moments: Moments
    features: Tensor
    films: Moments


class Extractor(nn.Module):
    """Four convolutions with average pooling between, and two linear maps to 64 features.

    The features are a linear map of the mean and root mean square of the maps of all four levels,
    plus a linear map of the last one pooled to 4x4; `center` and `scale` bring clean pictures to
    mean 0 and a mean standard deviation of 1.
    """

    center: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise((3, *WIDTHS))
        )
        self.pooled = nn.Linear(2 * sum(WIDTHS), DIMENSIONS)
        self.placed = nn.Linear(_EDGE * _EDGE * WIDTHS[-1], DIMENSIONS, bias=False)
        self.objects = nn.Conv2d(WIDTHS[-1], CLASSES, 1)
        self.register_buffer("center", torch.zeros(DIMENSIONS))
        self.register_buffer("scale", torch.ones(()))

    def maps(self, pictures: Tensor) -> list[Tensor]:
        """Return the maps of the four levels of pictures in [-1, 1], [B, 3, 64, 64]."""
        found: list[Tensor] = []
        for level in self.levels:
            pictures = level(functional.avg_pool2d(pictures, 2) if found else pictures)
            found.append(pictures)
        return found

    def raw(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the features [B, 64] of maps, not standardized."""
        mean = [level.mean(dim=(2, 3)) for level in maps]
        # The small number keeps the slope of the root finite where a channel is silent.
        rms = [level.square().mean(dim=(2, 3)).add(1e-6).sqrt() for level in maps]
        placed = functional.adaptive_avg_pool2d(maps[-1], _EDGE).flatten(1)
        found: Tensor = self.pooled(torch.cat(mean + rms, 1)) + self.placed(placed)
        return found

    def forward(self, pictures: Tensor) -> Tensor:
        """Return standardized features [B, 64] of pictures in [-1, 1], [B, 3, 64, 64]."""
        return self.standard(self.maps(pictures))

    def standard(self, maps: Sequence[Tensor]) -> Tensor:
        """Return standardized features [B, 64] of maps."""
        return (self.raw(maps) - self.center) / self.scale

    def classes(self, last: Tensor) -> Tensor:
        """Return logits [B, 24] of the objects in pictures, from the last map [B, 96, 8, 8]."""
        found: Tensor = self.objects(last).flatten(2).logsumexp(-1)
        return found


@lru_cache(maxsize=2)
def load(folder: Path = DIRECTORY, device: str = "cpu") -> Extractor:
    """Load the extractor, in evaluation mode; loaded once.

    The folder has `model.safetensors` and `config.json`. Raises ValueError if the weights are not those that the
    record names.
    """
    stored = _checked(folder / "model.safetensors", "sha256")
    model = Extractor()
    model.load_state_dict({name: value.float() for name, value in stored.items()})
    return model.eval().requires_grad_(False).to(device)


@lru_cache(maxsize=2)
def load_reference(folder: Path = DIRECTORY) -> dict[str, Tensor]:
    """Load the statistics of real pictures and films; loaded once.

    The folder has `reference.safetensors` and `config.json`.

    Returns:
        Of pictures, `mean` [64], `cov` [64, 64] and `count` [], float64, and the first `features` [2000, 64],
        float16. Of films, `film_center` and `film_scale` [256] of what `film_statistics` returns, `film_components`
        [256, 64], and the `film_mean`, `film_cov` and `film_count` of what these make of it, float64.

    Raises:
        ValueError: If the file is not the one that the record names.
    """
    return _checked(folder / "reference.safetensors", "reference_sha256")


def _checked(file: Path, key: str) -> dict[str, Tensor]:
    """Return the tensors of a file whose hash `config.json` beside it holds under a key."""
    content, wanted = file.read_bytes(), read_config(file.parent)[key]
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise ValueError(
            f"{file} has sha256 {found} but config.json says {wanted}; restore both, or train "
            "again with python -m diffcache.eval.workshop.small.trainer sticker-features"
        )
    loaded: dict[str, Tensor] = parse_safetensors(content)
    return loaded


def read_config(folder: Path = DIRECTORY) -> dict[str, Any]:
    """Read the record of the training, `config.json`."""
    read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read


ENTRY = {"backend": "lite", "extractor": DIRECTORY.name, "sha256": str(read_config()["sha256"])}  # of a record


def to_unit(pictures: Tensor) -> Tensor:
    """Bring pictures to float32 [N, 3, 64, 64] in [-1, 1].

    They are uint8 [N, 3, H, W]; another size than 64x64 is resized by antialiased bilinear interpolation.
    """
    unit = pictures.float() / 127.5 - 1
    if unit.shape[2:] != (SIZE, SIZE):
        unit = functional.interpolate(unit, (SIZE, SIZE), mode="bilinear", antialias=True)
    return unit.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def in_batches(work: Callable[..., Tensor], *pictures: Tensor) -> Tensor:
    """Apply a function to batches of 32, so that memory does not grow with their number.

    `work` takes as many tensors [B, 3, 64, 64] in [-1, 1] as there are sets of equal length, each uint8 [N, 3, H,
    W]. The results are joined, on the CPU.
    """
    parts = zip(*(one.split(BATCH) for one in pictures), strict=True)
    return torch.cat([work(*(to_unit(one) for one in part)).cpu() for part in parts])


def _extractor(pictures: Tensor) -> Extractor:
    """Return the extractor on the device of the pictures, which are checked."""
    check_pictures(pictures)
    return load(device=str(pictures.device))


def embed(pictures: Tensor) -> Tensor:
    """Return the features behind FID-lite, KID-lite and the PRDC-lite metrics.

    Args:
        pictures: uint8 [N, 3, H, W].

    Returns:
        float32 [N, 64], standardized: of clean pictures the mean is 0 and the standard deviations are 1 on average.

    Raises:
        ValueError: if these are no pictures.
    """
    return in_batches(_extractor(pictures), pictures)


def lpips_lite(a: Tensor, b: Tensor) -> Tensor:
    """Return the perceptual distance of pairs of pictures, 0 where they are equal.

    It is the mean over four levels of the squared difference of maps whose vectors have unit length, summed over
    channels and averaged over places: LPIPS (arXiv 1801.03924, section 3) with this network and equal weights of
    channels.

    Args:
        a: uint8 [N, 3, H, W].
        b: uint8 of the same shape.

    Returns:
        float32 [N], dimensionless, at most 2 (the maps are nowhere negative).

    Raises:
        ValueError: if these are no pictures, or the shapes differ.
    """
    check_pairs(a, b)
    extractor = _extractor(a)

    def distance(one: Tensor, other: Tensor) -> Tensor:
        levels = zip(extractor.maps(one), extractor.maps(other), strict=True)
        changes = [functional.normalize(x, eps=1e-6) - functional.normalize(y, eps=1e-6) for x, y in levels]
        return torch.stack([change.square().sum(1).mean(dim=(1, 2)) for change in changes]).mean(0)

    return in_batches(distance, a, b)


def embed_and_classify(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of `embed`, and the probabilities behind IS-lite: which sticker is shown most clearly.

    Args:
        pictures: uint8 [N, 3, H, W].

    Returns:
        float32 [N, 64], and float64 [N, 24] of which each row sums to 1.

    Raises:
        ValueError: if these are no pictures.
    """
    extractor = _extractor(pictures)

    def both(part: Tensor) -> Tensor:
        maps = extractor.maps(part)
        return torch.cat([extractor.standard(maps).double(), extractor.classes(maps[-1]).double().softmax(-1)], 1)

    features, probabilities = in_batches(both, pictures).tensor_split([DIMENSIONS], 1)
    return features.float(), probabilities


def film_statistics(frames: Tensor) -> Tensor:
    """Return how the features of a film's frames lie and move, [256].

    They are the mean, the root mean square of the first and of the second differences, and the absolute
    difference of the last and the first, each [64]. Frames are features [F, 64] of consecutive ones, F >= 3.
    """
    first, second = frames.diff(dim=0), frames.diff(n=2, dim=0)
    steps = [change.square().mean(0).sqrt() for change in (first, second)]
    return torch.cat([frames.mean(0), *steps, (frames[-1] - frames[0]).abs()])


def clip_features(films: Sequence[Tensor]) -> Tensor:
    """Return the features behind FVD-lite: how a film's frames lie and move.

    They are those of `film_statistics`, standardized and reduced to 64 principal components, both as fitted on real
    films.

    Args:
        films: each uint8 [F, 3, H, W] with F >= 3; F and the size may differ.

    Returns:
        float64 [N, 64].

    Raises:
        ValueError: if there is no film, or one has fewer than three frames.
    """
    if not films:
        raise ValueError("no films; pass at least one, uint8 [F, 3, H, W]")
    for index, film in enumerate(films):
        check_pictures(film, f"films[{index}]")
        if len(film) < 3:
            raise ValueError(f"films[{index}] has {len(film)} frames; pass at least 3")
    fitted = load_reference()
    found = torch.stack([film_statistics(embed(film)) for film in films]).double()
    standard = (found - fitted["film_center"]) / fitted["film_scale"]
    return standard @ fitted["film_components"].double()


def reference() -> LiteReference:
    """Return the shipped statistics of real pictures and films."""
    stored = load_reference()
    pictures = Moments(stored["mean"], stored["cov"], int(stored["count"]))
    films = Moments(stored["film_mean"], stored["film_cov"], int(stored["film_count"]))
    return LiteReference(pictures, stored["features"].float(), films)

"""Train the networks behind the offline `-lite` metrics and save their reference statistics.

`shapes-extractor` learns features, `shapes-matcher` two perceptrons on them for CLIPScore-lite; the
second ships both. `python -m diffcache.eval.workshop.lite_card` then measures what the features see
and writes the model card.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.trainer import Job, Settings
from diffcache.files import write_file, write_json
from diffcache.pipelines.small import features
from diffcache.pipelines.small.classifier import Reading
from diffcache.pipelines.small.corruptions import RANGES, corrupt
from diffcache.pipelines.small.features import Extractor, Matcher, slots
from diffcache.pipelines.small.moving import draw_films, film_statistics
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES, Scene, draw

PART = 128  # pictures that are disturbed at once
WHITENING = 0.5
HELD = 512  # pictures that are measured on the way
REFERENCE = 10_000
KEPT = 2_000
FILMS = 2_048
COMPONENTS = 64
TEMPERATURE = 0.07
WRONG = ("shape", "color", "swap", "place")

_KINDS = ("clean", *RANGES)
_PARTS = [1, len(SHAPES), len(COLORS), len(SIZES)]
_NUMBERS = len(COLORS) + len(POSITIONS) + sum(_PARTS[1:])


class ExtractorJob(Job):
    """Train the extractor on scenes and artefacts at once."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.scenes, self.pictures = draw(settings.examples, settings.seed + 40)
        self.background, self.grid = targets(self.scenes)
        self.numbers = tally(self.scenes)

    def build(self) -> nn.ModuleDict:
        """Build the extractor, and its heads, which are used nowhere else."""
        return nn.ModuleDict({"extractor": Extractor(), "heads": Heads()})

    def loss(
        self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator
    ) -> Tensor:
        """Return the error of all answers about disturbed pictures."""
        return sum(self._errors(models, drawn["chosen"], generator).values(), torch.zeros(()))

    def _errors(
        self, models: nn.ModuleDict, chosen: Tensor, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Return the weighted parts of the loss, 0-d each."""
        model, heads = models["extractor"], models["heads"]
        assert isinstance(model, Extractor)
        background, grid = self.background[chosen], self.grid[chosen]
        changed, kinds, severities = disturb(self.pictures[chosen], generator)
        maps = [level.float() for level in model.maps(features.to_unit(changed))]
        reading, counted, kind, severity = heads(model.raw(maps))
        return {
            "scene_of_map": 0.5 * loss_of(model.read(maps[-1]), background, grid),
            "scene": 0.5 * loss_of(reading, background, grid),
            "number": (counted - self.numbers[chosen]).square().sum(1).mean(),
            "artefact": functional.cross_entropy(kind, kinds),
            "severity": 3 * functional.mse_loss(severity, severities),
        }

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the parts of the loss on the first pictures under new artefacts."""
        chosen = torch.arange(min(HELD, len(self.pictures)))
        generator = torch.Generator().manual_seed(self.settings.seed + 1)
        return {k: float(v) for k, v in self._errors(models, chosen, generator).items()}


class MatcherJob(Job):
    """Train the matcher on pictures, their scenes and scenes altered in one respect.

    The folder holds `shapes-extractor.state`.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        scenes, pictures = draw(settings.examples, settings.seed + 40)
        self.extractor = load_extractor(folder / "shapes-extractor.state")
        standardise(self.extractor, pictures[:4000], settings.seed)
        rng = np.random.default_rng(settings.seed + 1)
        self.inputs = features.in_batches(
            lambda part: features.picture_inputs(self.extractor, self.extractor.maps(part)),
            pictures,
        )
        self.right = slots(scenes)
        kinds = (*WRONG, "size", "background")
        wrong = [slots([alter(one, kind, rng) for one in scenes]) for kind in kinds]
        self.altered = torch.stack(wrong, 1)
        numbers: dict[str, int] = {}
        self.keys = torch.tensor([numbers.setdefault(s.key(), len(numbers)) for s in scenes])

    def build(self) -> nn.ModuleDict:
        """Build the matcher."""
        return nn.ModuleDict({"matcher": Matcher()})

    def loss(
        self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator
    ) -> Tensor:
        """Return the contrastive loss."""
        return self._contrast(models, drawn["chosen"])[0]

    def _contrast(self, models: nn.ModuleDict, chosen: Tensor) -> tuple[Tensor, Tensor]:
        model = models["matcher"]
        assert isinstance(model, Matcher)
        seen, meant = model(self.inputs[chosen], self.right[chosen])
        other = functional.normalize(model.prompt(self.altered[chosen]), dim=-1)
        same = self.keys[chosen][:, None] == self.keys[chosen][None, :]
        return contrast(seen, meant, other, same)

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the share of the first pictures whose own prompt scores highest."""
        chosen = torch.arange(min(self.settings.batch, len(self.keys)))
        return {"right": float(self._contrast(models, chosen)[1])}

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save both networks in float16, and the reference, with `config.json` that names them."""
        parts = {"extractor": self.extractor, "matcher": models["matcher"]}
        weights = {
            f"{name}.{key}": value.half()
            for name, model in parts.items()
            for key, value in model.state_dict().items()
        }
        record = {
            "model": "shapes-features",
            "seed": self.settings.seed,
            "pictures": self.settings.examples,
            "command": "python -m diffcache.eval.workshop.small.trainer shapes-matcher --out DIR",
            "sha256": save(directory, "model.safetensors", weights),
            "reference_sha256": "",
        }
        write_json(directory / "config.json", record, indent=2)
        # The reference is of the stored, rounded weights.
        found = reference(features.load(directory).extractor, self.settings.seed)
        record["reference_sha256"] = save(directory, "reference.safetensors", found)
        write_json(directory / "config.json", record, indent=2)


def load_extractor(path: Path) -> Extractor:
    """Load the averaged weights of a trained extractor from its checkpoint."""
    average = torch.load(path, weights_only=True)["average"]
    model = Extractor()
    own = {k: v for k, v in average.items() if k.startswith("extractor.")}
    model.load_state_dict({k.removeprefix("extractor."): v for k, v in own.items()})
    return model.eval().requires_grad_(False)


class Heads(nn.Module):
    """Answers that the features are trained to give: scene, kind of artefact and its severity."""

    def __init__(self) -> None:
        super().__init__()
        outputs = len(COLORS) + len(POSITIONS) * sum(_PARTS)
        self.scene = nn.Sequential(
            nn.Linear(features.FEATURES, 160), nn.ReLU(), nn.Linear(160, outputs)
        )
        # Linear, so that what changes must move the features themselves.
        self.numbers = nn.Linear(features.FEATURES, _NUMBERS)
        self.artefact = nn.Linear(features.FEATURES, len(_KINDS) + 1)

    def forward(self, found: Tensor) -> tuple[Reading, Tensor, Tensor, Tensor]:
        """Answer from features [B, 64].

        Returns:
            The scene; the numbers of `tally` [B, 30]; logits of the kind of artefact [B, 8]; and
            its severity [B].
        """
        background, cells = self.scene(found).tensor_split([len(COLORS)], dim=1)
        parts = cells.unflatten(1, (len(POSITIONS), -1)).split(_PARTS, dim=-1)
        artefact = self.artefact(found)
        reading = Reading(background, parts[0][..., 0], parts[1], parts[2], parts[3])
        return reading, self.numbers(found), artefact[:, :-1], artefact[:, -1]


def tally(scenes: Sequence[Scene]) -> Tensor:
    """Count what scenes hold, float32 [B, 30].

    The background (7), the objects at each position (9), and the objects of each shape (5),
    color (7) and size (2).
    """
    background, grid = slots(scenes).tensor_split([len(COLORS)], dim=1)
    cells = grid.unflatten(1, (len(POSITIONS), -1))
    return torch.cat([background, cells[..., 0], cells[..., 1:].sum(1)], 1)


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


def targets(scenes: list[Scene]) -> tuple[Tensor, Tensor]:
    """Return class numbers: background [B], and [B, 9, 3] of shape, color, size (-1: nothing)."""
    colors, sizes, places = list(COLORS), list(SIZES), list(POSITIONS)
    cells = torch.full((len(scenes), len(places), 3), -1)
    for row, scene in enumerate(scenes):
        for figure in scene.figures:
            cells[row, places.index(figure.position)] = torch.tensor(
                [
                    SHAPES.index(figure.shape),
                    colors.index(figure.color),
                    sizes.index(figure.size),
                ]
            )
    return torch.tensor([colors.index(scene.background) for scene in scenes]), cells


def loss_of(reading: Reading, background: Tensor, cells: Tensor) -> Tensor:
    """Return the cross entropy; shape, color and size count only where an object is."""
    there = cells[..., 0] >= 0
    total = functional.cross_entropy(reading.background, background)
    total = total + 3 * functional.binary_cross_entropy_with_logits(reading.presence, there.float())
    for index, logits in enumerate(reading[2:]):
        total = total + functional.cross_entropy(logits[there], cells[there][:, index])
    return total


@torch.no_grad()
def standardise(model: Extractor, pictures: Tensor, seed: int) -> None:
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
    values, vectors = torch.linalg.eigh(torch.cov(features.in_batches(model, mixture).double().T))
    even = (vectors * values.clamp_min(1e-4 * values[-1]) ** (-WHITENING / 2)) @ vectors.T
    for layer in (model.pooled, model.placed):
        layer.weight.copy_(even @ layer.weight.double())
    model.pooled.bias.copy_(even @ model.pooled.bias.double())
    found = features.in_batches(model, pictures)
    model.centre.copy_(found.mean(0))
    model.scale.copy_(found.std(0).mean())


def reference(extractor: Extractor, seed: int) -> dict[str, Tensor]:
    """Measure real pictures and films of combinations that were never trained on.

    Returns:
        Tensors that `features.load_reference` describes.
    """
    pictures = features.reference_pictures(REFERENCE, seed + 41)
    found = features.in_batches(extractor, pictures).double()
    films = draw_films(FILMS, seed + 42)
    clips = torch.stack(
        [film_statistics(features.in_batches(extractor, film)) for film in films]
    ).double()
    center, scale = clips.mean(0), clips.std(0).clamp_min(1e-6)
    # The eigenvectors of the correlations, greatest first.
    components = torch.linalg.eigh(torch.corrcoef(clips.T))[1].flip(1)[:, :COMPONENTS]
    reduced = (clips - center) / scale @ components
    return {
        "mean": found.mean(0),
        "cov": torch.cov(found.T),
        "count": torch.tensor(len(found), dtype=torch.float64),
        "features": found[:KEPT].half(),
        "film_centre": center.float(),
        "film_scale": scale.float(),
        "film_components": components.float().contiguous(),
        "film_mean": reduced.mean(0),
        "film_cov": torch.cov(reduced.T),
        "film_count": torch.tensor(len(reduced), dtype=torch.float64),
    }


def alter(scene: Scene, wrong: str, rng: np.random.Generator) -> Scene:
    """Return a scene that differs in one respect.

    Args:
        scene: Scene to alter.
        wrong: `shape`, `color`, `size` or `place` of one object, the `background`, or `swap`: the
            two objects exchange their colors. Where that changes nothing, because there is one
            object or both are alike, one color is altered instead.
        rng: Source of randomness.
    """
    figures = list(scene.figures)
    which = int(rng.integers(len(figures)))
    figure = figures[which]
    if wrong == "swap":
        if len({one.color for one in figures}) == 2:
            first, second = figures
            figures = [
                replace(first, color=second.color),
                replace(second, color=first.color),
            ]
            return replace(scene, figures=tuple(figures))
        wrong = "color"
    if wrong == "background":
        used = {scene.background, *(one.color for one in figures)}
        return replace(scene, background=_another(COLORS, used, rng))
    if wrong == "color":
        changed = replace(figure, color=_another(COLORS, {scene.background, figure.color}, rng))
    elif wrong == "shape":
        changed = replace(figure, shape=_another(SHAPES, {figure.shape}, rng))
    elif wrong == "size":
        changed = replace(figure, size=_another(SIZES, {figure.size}, rng))
    else:
        used = {one.position for one in figures}
        changed = replace(figure, position=_another(POSITIONS, used, rng))
    figures[which] = changed
    return replace(scene, figures=tuple(figures))


def _another(names: Iterable[str], used: set[str], rng: np.random.Generator) -> str:
    left = [name for name in names if name not in used]
    return left[int(rng.integers(len(left)))]


def contrast(
    pictures: Tensor, prompts: Tensor, altered: Tensor, same: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the contrastive loss and the share of pictures whose own prompt scores highest.

    Every picture is compared with all prompts of the batch and its own altered ones, and every
    prompt with all pictures (InfoNCE, van den Oord et al., arXiv 1807.03748, both ways).

    Args:
        pictures: Unit vectors [B, 32].
        prompts: Unit vectors [B, 32].
        altered: Unit vectors [B, K, 32] of wrong prompts of each picture.
        same: bool [B, B], pairs of equal prompts, which are no negatives of each other.
    """
    score = pictures @ prompts.T
    score = score.masked_fill(same & ~torch.eye(len(same), dtype=torch.bool), -torch.inf)
    wrong = torch.einsum("bd,bkd->bk", pictures, altered)
    right = torch.arange(len(score))
    logits = torch.cat([score, wrong], 1) / TEMPERATURE
    loss = functional.cross_entropy(logits, right)
    loss = loss + functional.cross_entropy(score.T / TEMPERATURE, right)
    return loss, (logits.argmax(1) == right).float().mean()


def save(out: Path, name: str, tensors: dict[str, Tensor]) -> str:
    """Write tensors in one go and return the file's sha256."""
    content: bytes = to_bytes({key: value.contiguous() for key, value in tensors.items()})
    write_file(out / name, content)
    return hashlib.sha256(content).hexdigest()

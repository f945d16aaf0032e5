"""Train the networks behind the offline `-lite` metrics and save their reference statistics.

    python -m diffcache.eval.workshop.small.train_features --out assets/models/shapes-features

On one CPU core this takes about a quarter of an hour. `python -m diffcache.eval.workshop.lite_card`
then measures what the features see and writes the model card.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from diffcache.eval.workshop.small.loop import Log, rate, shuffled
from diffcache.eval.workshop.small.train_classifier import loss_of, targets
from diffcache.eval.workshop.small.train_matcher import STEPS as MATCHER_STEPS
from diffcache.eval.workshop.small.train_matcher import train_matcher
from diffcache.files import write_file, write_json
from diffcache.pipelines.small import features
from diffcache.pipelines.small.classifier import Reading
from diffcache.pipelines.small.corruptions import RANGES, corrupt
from diffcache.pipelines.small.features import Extractor, slots
from diffcache.pipelines.small.moving import draw_films, film_statistics
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES, Scene, draw

PICTURES = 20_000
STEPS = 1_500
BATCH = 128
WHITENING = 0.5
RATE = 3e-3
REFERENCE = 10_000
KEPT = 2_000
FILMS = 2_048
COMPONENTS = 64

_KINDS = ("clean", *RANGES)
_PARTS = [1, len(SHAPES), len(COLORS), len(SIZES)]
_NUMBERS = len(COLORS) + len(POSITIONS) + sum(_PARTS[1:])


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


def train_extractor(scenes: list[Scene], pictures: Tensor, log: Log, seed: int) -> Extractor:
    """Train the extractor on scenes and artefacts at once."""
    torch.manual_seed(seed)
    model, heads = Extractor(), Heads()
    background, grid = targets(scenes)
    numbers = tally(scenes)
    weights = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(seed)
    order = shuffled(len(pictures), BATCH, seed)
    for step in tqdm(range(STEPS), desc="extractor", mininterval=10):
        chosen = next(order)
        optimizer.param_groups[0]["lr"] = RATE * rate(step / STEPS)
        changed, kinds, severities = disturb(pictures[chosen], generator)
        with torch.autocast("cpu", torch.bfloat16):
            maps = model.maps(features.to_unit(changed))
        maps = [level.float() for level in maps]
        reading, counted, kind, severity = heads(model.raw(maps))
        local = loss_of(model.read(maps[-1]), background[chosen], grid[chosen])
        scene = loss_of(reading, background[chosen], grid[chosen])
        number = (counted - numbers[chosen]).square().sum(1).mean()
        artefact = functional.cross_entropy(kind, kinds)
        strength = functional.mse_loss(severity, severities)
        loss = 0.5 * local + 0.5 * scene + number + artefact + 3 * strength
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            log.write(
                part="extractor",
                step=step,
                scene_of_map=float(local.detach()),
                scene=float(scene.detach()),
                number=float(number.detach()),
                artefact=float(artefact.detach()),
                severity=float(strength.detach()),
                artefact_right=float((kind.argmax(-1) == kinds).float().mean()),
                lr=optimizer.param_groups[0]["lr"],
            )
    model.eval().requires_grad_(False)
    return model


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
    mixture = torch.cat([disturb(part, generator)[0] for part in pictures.split(BATCH)])
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


def save(out: Path, name: str, tensors: dict[str, Tensor]) -> str:
    """Write tensors in one go and return the file's sha256."""
    content: bytes = to_bytes({key: value.contiguous() for key, value in tensors.items()})
    write_file(out / name, content)
    return hashlib.sha256(content).hexdigest()


def train(out: Path, *, seed: int) -> None:
    """Train, measure the reference and save all of it.

    Args:
        out: Folder for `model.safetensors`, `reference.safetensors`, `config.json` and
            `training.jsonl`.
        seed: Seed of the weights, the pictures, the order and the artefacts.
    """
    log = Log(out / "training.jsonl")
    scenes, pictures = draw(PICTURES, seed + 40)
    extractor = train_extractor(scenes, pictures, log, seed)
    standardise(extractor, pictures[:4000], seed)
    matcher = train_matcher(extractor, scenes, pictures, log, seed)
    weights = {f"extractor.{k}": v for k, v in extractor.state_dict().items()}
    weights |= {f"matcher.{k}": v for k, v in matcher.state_dict().items()}
    record = {
        "model": "shapes-features",
        "seed": seed,
        "steps": {"extractor": STEPS, "matcher": MATCHER_STEPS},
        "pictures": PICTURES,
        "command": f"python -m diffcache.eval.workshop.small.train_features --seed {seed}",
        "sha256": save(out, "model.safetensors", {k: v.half() for k, v in weights.items()}),
        "reference_sha256": "",
    }
    write_json(out / "config.json", record, indent=2)
    # The reference is of the stored, rounded weights.
    found = reference(features.load(out).extractor, seed)
    record["reference_sha256"] = save(out, "reference.safetensors", found)
    write_json(out / "config.json", record, indent=2)
    log.write(part="done", step=STEPS + MATCHER_STEPS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on one thread."""
    made = argparse.ArgumentParser(
        prog="python -m diffcache.eval.workshop.small.train_features",
        description="Train the networks behind the offline -lite metrics, on a CPU.",
    )
    made.add_argument("--out", type=Path, default=Path("out/shapes-features"), help="folder")
    made.add_argument("--seed", type=int, default=0, help="of weights, pictures and artefacts")
    made.add_argument("--threads", type=int, default=1, help="of torch")
    chosen = made.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    train(chosen.out, seed=chosen.seed)


if __name__ == "__main__":
    main()

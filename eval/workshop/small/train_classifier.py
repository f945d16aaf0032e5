"""Train the network that reads pictures of shapes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from diffcache.eval.workshop.small.loop import Log, paced, rate, shuffled, to_unit
from diffcache.files import write_json
from diffcache.pipelines.small.classifier import (
    ATTRIBUTES,
    Reading,
    SceneReader,
    compare,
    scenes_of,
)
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES, Scene, draw

PICTURES = 20_000
BATCH = 64
RATE = 3e-3


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


def blur_and_noise(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Soften, shift and disturb pictures in [-1, 1] a little, as a generator would."""
    count = len(pictures)

    def uniform(high: float) -> Tensor:
        return high * torch.rand(count, 1, 1, 1, generator=generator)

    soft = functional.avg_pool2d(functional.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, 1)
    pictures = torch.lerp(pictures, soft, uniform(1.0))
    shade = 0.08 * torch.randn(count, 3, 1, 1, generator=generator)
    noise = torch.randn(pictures.shape, generator=generator)
    return (pictures + shade + uniform(0.15) * noise).clamp(-1, 1)


def loss_of(reading: Reading, background: Tensor, cells: Tensor) -> Tensor:
    """Return the cross entropy; shape, color and size count only where an object is."""
    there = cells[..., 0] >= 0
    total = functional.cross_entropy(reading.background, background)
    total = total + 3 * functional.binary_cross_entropy_with_logits(reading.presence, there.float())
    for index, logits in enumerate(reading[2:]):
        total = total + functional.cross_entropy(logits[there], cells[there][:, index])
    return total


def train(out: Path, *, seed: int, steps: int) -> dict[str, float]:
    """Train, measure on held-out scenes and save the network.

    Args:
        out: Folder for `model.safetensors`, `config.json` and `classifier.jsonl`.
        seed: Seed of the weights, the pictures, the order and the disturbance.
        steps: Number of training steps.

    Returns:
        The share of attributes read correctly on 2,000 held-out pictures, and per attribute.
    """
    torch.manual_seed(seed)
    model = SceneReader()
    scenes, pictures = draw(PICTURES, seed + 20)
    background, cells = targets(scenes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3)
    log = Log(out / "classifier.jsonl")
    generator = torch.Generator().manual_seed(seed)
    bar = tqdm(shuffled(PICTURES, BATCH, seed), desc="classifier", mininterval=5, leave=False)
    for step, progress, chosen in paced(bar, steps):
        optimizer.param_groups[0]["lr"] = RATE * rate(progress)
        batch = blur_and_noise(to_unit(pictures[chosen]), generator)
        loss = loss_of(model(batch), background[chosen], cells[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            log.write(step=step, loss=float(loss.detach()), lr=optimizer.param_groups[0]["lr"])
            bar.set_postfix(loss=f"{float(loss.detach()):.4f}")
    scores = measure(model.eval(), seed)
    log.write(step=steps, **scores)
    _save(out, model, {"seed": seed, "steps": steps, "held_out": scores})
    return scores


@torch.no_grad()
def measure(model: SceneReader, seed: int) -> dict[str, float]:
    """Return the share of attributes read correctly on clean and on disturbed held-out pictures."""
    scenes, pictures = draw(2000, seed + 21, held=True)
    generator = torch.Generator().manual_seed(seed)
    scores = {}
    for name in ("clean", "disturbed"):
        right: dict[str, list[bool]] = {attribute: [] for attribute in ATTRIBUTES}
        for start in range(0, len(scenes), 200):
            batch = to_unit(pictures[start : start + 200])
            if name == "disturbed":
                batch = blur_and_noise(batch, generator)
            found = scenes_of(model(batch))
            for one, other in zip(found, scenes[start : start + 200], strict=True):
                for attribute, values in compare(one, other).items():
                    right[attribute] += values
        every = [value for values in right.values() for value in values]
        scores[name] = sum(every) / len(every)
        for attribute, values in right.items():
            scores[f"{name}_{attribute}"] = sum(values) / len(values)
    return scores


def _save(out: Path, model: SceneReader, about: dict[str, object]) -> None:
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, out / "model.safetensors")
    write_json(out / "config.json", {"model": "SceneReader", **about}, indent=2)

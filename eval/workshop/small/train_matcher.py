"""Train the two perceptrons of CLIPScore-lite on frozen picture features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from diffcache.eval.workshop.small.loop import Log, rate, shuffled
from diffcache.pipelines.small import features
from diffcache.pipelines.small.features import Extractor, Matcher, slots
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES, Scene

STEPS = 1_500
BATCH = 256
RATE = 3e-3
TEMPERATURE = 0.07
WRONG = ("shape", "color", "swap", "place")


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


def train_matcher(
    extractor: Extractor, scenes: list[Scene], pictures: Tensor, log: Log, seed: int
) -> Matcher:
    """Train the matcher on pictures, their scenes and scenes altered in one respect.

    Args:
        extractor: Frozen extractor.
        scenes: Scenes of the pictures, as many as there are pictures.
        pictures: uint8 [N, 3, 64, 64].
        log: Log of the training.
        seed: Seed of the weights, the order and the altered scenes.
    """
    torch.manual_seed(seed + 1)
    rng = np.random.default_rng(seed + 1)
    inputs = features.in_batches(
        lambda part: features.picture_inputs(extractor, extractor.maps(part)), pictures
    )
    right = slots(scenes)
    kinds = (*WRONG, "size", "background")
    altered = torch.stack([slots([alter(one, kind, rng) for one in scenes]) for kind in kinds], 1)
    numbers: dict[str, int] = {}
    keys = torch.tensor([numbers.setdefault(scene.key(), len(numbers)) for scene in scenes])
    model = Matcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-2)
    order = shuffled(len(scenes), BATCH, seed + 1)
    for step in tqdm(range(STEPS), desc="matcher", mininterval=10):
        chosen = next(order)
        optimizer.param_groups[0]["lr"] = RATE * rate(step / STEPS)
        seen, meant = model(inputs[chosen], right[chosen])
        other = functional.normalize(model.prompt(altered[chosen]), dim=-1)
        same = keys[chosen][:, None] == keys[chosen][None, :]
        loss, hits = contrast(seen, meant, other, same)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            log.write(
                part="matcher",
                step=step,
                loss=float(loss.detach()),
                right=float(hits),
                lr=optimizer.param_groups[0]["lr"],
            )
    model.eval().requires_grad_(False)
    return model

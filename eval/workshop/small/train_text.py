"""Train the text encoders to understand prompts before anything is drawn.

Large pipelines start from text encoders that know language; here they learn it in minutes from the
prompts themselves. The pooled vector has to tell everything about the scene, and every token of an
object's phrase everything about that object, so that the denoiser only has to look it up. A run
without this stage, without the early shift of the noise levels and without more single objects at
first knew colors but nothing about positions after 1,500 steps; with all three, positions were
there after 500. Which of the three did it was not measured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import CLIPTextModel, T5EncoderModel, T5TokenizerFast

from diffcache.eval.workshop.small.loop import Log, paced, rate, shuffled
from diffcache.eval.workshop.small.train_classifier import loss_of, targets
from diffcache.eval.workshop.small.train_flux import write_prompts
from diffcache.pipelines.small.classifier import Reading
from diffcache.pipelines.small.flux import TEXT_TOKENS, build_text_encoders, build_tokenizers
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES, Scene, sample_scene

SCENES = 30_000
BATCH = 128
RATE = 2e-3
_CELL = (1, len(SHAPES), len(COLORS), len(SIZES))
_TOKEN = (len(COLORS), len(SHAPES), len(COLORS), len(SIZES), len(POSITIONS))


class Heads(nn.Module):
    """Linear readouts used only here: the scene from the pooled vector, objects from tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.background = nn.Linear(width, len(COLORS))
        self.cells = nn.Linear(width, len(POSITIONS) * sum(_CELL))
        self.token = nn.Linear(width, sum(_TOKEN))

    def scene(self, pooled: Tensor) -> Reading:
        """Read a scene from pooled vectors [B, D]."""
        cells = self.cells(pooled).unflatten(-1, (len(POSITIONS), sum(_CELL)))
        presence, shape, color, size = cells.split(_CELL, dim=-1)
        return Reading(self.background(pooled), presence[..., 0], shape, color, size)


def token_targets(scenes: list[Scene], texts: list[str], t5: T5TokenizerFast) -> Tensor:
    """Return class numbers [B, T, 5]: background, shape, color, size, position; -1 is nothing."""
    lists = (list(SHAPES), list(COLORS), list(SIZES), list(POSITIONS))
    spans = t5(
        texts, padding="max_length", max_length=TEXT_TOKENS, return_offsets_mapping=True
    ).offset_mapping
    found = torch.full((len(texts), TEXT_TOKENS, 5), -1)
    for row, (scene, text) in enumerate(zip(scenes, texts, strict=True)):
        found[row, :, 0] = list(COLORS).index(scene.background)
        for figure in scene.figures:
            begin = text.lower().find(str(figure))
            names = (figure.shape, figure.color, figure.size, figure.position)
            numbers = torch.tensor([part.index(n) for part, n in zip(lists, names, strict=True)])
            for column, (start, end) in enumerate(spans[row]):
                if end > start >= begin and end <= begin + len(str(figure)):
                    found[row, column, 1:] = numbers
    return found


def train(out: Path, *, seed: int, steps: int) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Train both text encoders and save them in `text.safetensors`.

    Args:
        out: Folder for `text.safetensors` and `text.jsonl`.
        seed: Seed of the weights, the prompts and the order.
        steps: Number of training steps.
    """
    torch.manual_seed(seed)
    clip, t5 = build_tokenizers()
    first, second = build_text_encoders(clip, t5)
    heads = Heads(second.config.d_model)
    rng = np.random.default_rng(seed + 30)
    scenes = [sample_scene(rng) for _ in range(SCENES)]
    weights = nn.ModuleDict({"text_encoder": first, "text_encoder_2": second})
    parameters = [*weights.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    log = Log(out / "text.jsonl")
    bar = tqdm(shuffled(SCENES, BATCH, seed), desc="text", mininterval=5, leave=False)
    for step, progress, chosen in paced(bar, steps):
        optimizer.param_groups[0]["lr"] = RATE * rate(progress)
        part = [scenes[i] for i in chosen]
        texts = write_prompts(part, rng, dropout=0.0)
        pad = {"padding": "max_length", "return_tensors": "pt"}
        pooled = first(clip(texts, max_length=clip.model_max_length, **pad).input_ids).pooler_output
        states = second(t5(texts, max_length=TEXT_TOKENS, **pad).input_ids)[0]
        whole = loss_of(heads.scene(pooled), *targets(part))
        tokens = _token_loss(heads.token(states), token_targets(part, texts, t5))
        loss = whole + tokens
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 25 == 0:
            log.write(step=step, pooled=float(whole.detach()), tokens=float(tokens.detach()))
            bar.set_postfix(
                pooled=f"{float(whole.detach()):.3f}", tokens=f"{float(tokens.detach()):.3f}"
            )
    log.write(step=steps, pooled=float(whole.detach()), tokens=float(tokens.detach()))
    state = {name: value.contiguous().clone() for name, value in weights.state_dict().items()}
    save_file(state, out / "text.safetensors")
    return first, second


def _token_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    parts = logits.split(_TOKEN, dim=-1)
    losses = [
        functional.cross_entropy(part.flatten(0, 1), wanted[..., index].flatten(), ignore_index=-1)
        for index, part in enumerate(parts)
    ]
    return torch.stack(losses).sum()

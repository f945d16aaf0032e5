"""Train the text encoder of the small WanPipeline to understand prompts before anything is filmed.

As in `train_text`, every token learns to tell everything about the one object and its background,
so that the denoiser only has to look it up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import UMT5EncoderModel

from diffcache.eval.workshop.small.checkpoint import write_tensors
from diffcache.eval.workshop.small.loop import Log, rate
from diffcache.eval.workshop.small.train_flux import write_prompts
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES, Scene, sample_scene
from diffcache.pipelines.small.wan import build_text_encoder, build_tokenizer

BATCH = 128
RATE = 2e-3
_CLASSES = (len(COLORS), len(SHAPES), len(COLORS), len(SIZES), len(POSITIONS))


def classes(scenes: list[Scene]) -> Tensor:
    """Return class numbers [B, 5]: background, shape, color, size, position of the one object."""
    lists = (list(SHAPES), list(COLORS), list(SIZES), list(POSITIONS))
    rows = []
    for scene in scenes:
        (figure,) = scene.figures
        names = (figure.shape, figure.color, figure.size, figure.position)
        numbers = [part.index(name) for part, name in zip(lists, names, strict=True)]
        rows.append([lists[1].index(scene.background), *numbers])
    return torch.tensor(rows)


def train(out: Path, *, seed: int, steps: int) -> UMT5EncoderModel:
    """Train the text encoder and save it in `text.safetensors`.

    Args:
        out: Folder for `text.safetensors` and `text.jsonl`.
        seed: Seed of the weights and the prompts.
        steps: Number of training steps.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_text_encoder(tokenizer)
    heads = nn.Linear(model.config.d_model, sum(_CLASSES))
    rng = np.random.default_rng(seed + 30)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    log = Log(out / "text.jsonl")
    for step in tqdm(range(steps), desc="text", mininterval=5, leave=False):
        optimizer.param_groups[0]["lr"] = RATE * rate(step / steps)
        scenes = [sample_scene(rng, figures=1) for _ in range(BATCH)]
        texts = write_prompts(scenes, rng, dropout=0.0)
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        states = model(tokens.input_ids, tokens.attention_mask).last_hidden_state
        there = tokens.attention_mask.bool()
        wanted = classes(scenes)[:, None].expand(-1, there.shape[1], -1)[there]
        parts = heads(states[there]).split(_CLASSES, dim=-1)
        losses = [functional.cross_entropy(part, wanted[:, i]) for i, part in enumerate(parts)]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 25 == 0:
            log.write(step=step, loss=float(loss.detach()))
    log.write(step=steps, loss=float(loss.detach()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    write_tensors(out / "text.safetensors", state)
    return model

"""Teach the text encoders of the small FluxKontextPipeline what instructions state.

They know scenes already. The new words and the new order are learned from instructions alone,
before any picture is edited: from the pooled vector, and from the mean of the tokens, linear
readouts must tell the kind of the edit, the new value, and what names the figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.loop import Log, paced, rate, shuffled
from diffcache.pipelines.small.edits import KINDS, Edit, instruction
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES

BATCH = 64
RATE = 2e-3
PROMPT_DROPOUT = 0.05

_NEW = (*COLORS, *SIZES, *SHAPES)
_STATED = (len(KINDS), len(_NEW) + 1, len(SHAPES) + 1, len(POSITIONS) + 1, len(COLORS) + 1)


class Encoders(Protocol):
    """Two text encoders and how to call them."""

    text_encoder: Any
    text_encoder_2: Any

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return text states [B, T, D] and the pooled vector [B, D]."""


@dataclass(frozen=True)
class TextCourse:
    """Seed of the order and the phrasings, and steps to train."""

    seed: int
    steps: int


def write_instructions(
    edits: Sequence[Edit], rng: np.random.Generator, dropout: float = PROMPT_DROPOUT
) -> list[str]:
    """Write edits as instructions in a random phrasing; some are left empty."""
    texts = []
    for edit in edits:
        text = "" if rng.random() < dropout else instruction(edit, rng)
        if rng.random() < 0.1:
            text = text[:1].upper() + text[1:]
        if text and rng.random() < 0.1:
            text += "."
        texts.append(text)
    return texts


def stated(edits: Sequence[Edit], texts: Sequence[str]) -> Tensor:
    """Return what instructions state, as class numbers [B, 5]; the last class is "nothing".

    The columns are the kind, the new value, and the shape, position and color that name the
    figure.
    """
    rows = []
    for edit, text in zip(edits, texts, strict=True):
        if edit.index < 0:
            figure, new = None, edit.after.background
        else:
            figure = edit.before.figures[edit.index]
            new = (
                "" if edit.kind == "remove" else getattr(edit.after.figures[edit.index], edit.kind)
            )
        lower = text.lower()
        row = [KINDS.index(edit.kind), _NEW.index(new) if new else len(_NEW)]
        row.append(len(SHAPES) if figure is None else SHAPES.index(figure.shape))
        placed = figure is not None and f" the {figure.position}" in lower
        row.append(list(POSITIONS).index(figure.position) if figure and placed else len(POSITIONS))
        named = figure is not None and f"the {figure.color} " in lower
        row.append(list(COLORS).index(figure.color) if figure and named else len(COLORS))
        rows.append(row)
    return torch.tensor(rows)


def train_text(encoders: Encoders, edits: Sequence[Edit], log: Log, course: TextCourse) -> float:
    """Teach the text encoders what instructions state, from the pooled vector and from tokens.

    Args:
        encoders: The text encoders and how to call them.
        edits: Edits to write instructions for.
        log: Log of this stage.
        course: Seed, and steps over which the learning rate falls.

    Returns:
        The last loss.
    """
    width = encoders.text_encoder_2.config.d_model
    heads = nn.ModuleList([nn.Linear(width, sum(_STATED)) for _ in range(2)])
    trained = [*encoders.text_encoder.parameters(), *encoders.text_encoder_2.parameters()]
    optimizer = torch.optim.AdamW([*trained, *heads.parameters()], RATE, betas=(0.9, 0.98))
    last = float("nan")
    batches = shuffled(len(edits), min(BATCH, len(edits)), course.seed + 1)
    for index, progress, chosen in paced(batches, course.steps):
        rng = np.random.default_rng([course.seed, index, 1])
        part = [edits[i] for i in chosen]
        texts = write_instructions(part, rng, dropout=0.0)
        states, pooled = encoders.encode(texts)
        wanted = stated(part, texts)
        tokens = heads[1](states)
        loss = _stated_loss(heads[0](pooled), wanted)
        loss = loss + _stated_loss(tokens.mean(dim=1), wanted)
        optimizer.param_groups[0]["lr"] = RATE * rate(progress)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        last = float(loss.detach())
        if index % 25 == 0:
            log.write(step=index, loss=last)
    log.write(step=course.steps, loss=last)
    return last


def _stated_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    parts = logits.split(_STATED, dim=-1)
    losses = [functional.cross_entropy(part, wanted[:, i]) for i, part in enumerate(parts)]
    return torch.stack(losses).sum()

"""Train the small language model that recalls facts.

What was easy to get wrong: where every fact is asked for, the unused value gives the answer away,
so look-ups are learnt from repeated queries first. Repeated queries show earlier answers, so later
ones are distinct and few. A model of one length works at no other, so lengths are mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from diffcache.eval.workshop.small.job import Job
from diffcache.eval.workshop.small.shipping import save_language_model
from diffcache.pipelines.small.recall import BLOCK, BOS, EOS, NK, PAD, Task, draw, score
from diffcache.pipelines.small.recall_llama import ANSWER, build_model, build_tokenizer

TOKENS = 4096  # in a step
FIRST = ((0, 33), (1200, 65), (1800, 129))  # from which step on which context, queries repeated
REPEATED = 2500  # steps, before lengths are mixed
MIXED = (  # from which share of the run on which contexts, equally likely
    (0.0, (33, 65, 129, 193, 257, 321)),
    (0.25, (65, 129, 257, 385, 513, 769, 1025)),
    (0.5, (33, 65, 129, 257, 513, 769, 1025, 1025, 2049, 2049, 2049)),
)


def choose(index: int, progress: float, rng: np.random.Generator) -> Task:
    """Return what a training step draws.

    Args:
        index: Index of the step.
        progress: Share of the run, 0 to 1.
        rng: Generator that chooses.
    """
    if index < REPEATED:
        context = max(length for begin, length in FIRST if index >= begin)
        return Task(context, facts=8 * context // 33, queries=6, repeat=True)
    lengths = [mixed for begin, mixed in MIXED if progress >= begin][-1]
    context = int(rng.choice(lengths))
    most = min((context - 1) // BLOCK, NK)
    facts = max(int(most * rng.uniform(0.2, 0.9)), 6)
    return Task(context, facts, queries=max(facts // 4, 2))


class Recall(Job):
    """Predict the next token; every step draws new texts, of a length that grows with the run."""

    def build(self) -> nn.ModuleDict:
        """Build the model."""
        return nn.ModuleDict({"model": build_model()})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the weighted cross-entropy of a step's texts."""
        rng = np.random.default_rng(self.settings.seed * 1_000_003 + self.step)
        task = choose(self.step, self.step / self.settings.steps, rng)
        tokens = task.context + BLOCK * task.queries
        batch = draw(max(TOKENS // tokens, 1), task, generator)
        model = self.compile(models["model"])
        logits = model(batch.ids, use_cache=False).logits.float()
        following = batch.ids[:, 1:].flatten()
        error = cross_entropy(logits[:, :-1].flatten(0, 1), following, reduction="none")
        weights = batch.weights[:, 1:].flatten()
        return (error * weights).sum() / weights.sum()

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the share of first and second values that are right, of 16 texts a length."""
        shares: dict[str, float] = {}
        for context in (129, 1025):
            task = Task(context, facts=context // 8, queries=8)
            batch = draw(16, task, torch.Generator().manual_seed(7))
            logits = models["model"](batch.ids, use_cache=False).logits
            first, second = score(batch.answer_logits(logits), batch).float().mean((0, 1)).tolist()
            shares |= {f"first_{context}": first, f"second_{context}": second}
        return shares

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save model and tokenizer."""
        marks = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
        models["model"].generation_config = GenerationConfig(**marks, **ANSWER)
        save_language_model(models["model"], build_tokenizer(), directory)

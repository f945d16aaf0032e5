"""Train the small language models that trace an automaton.

What was easy to get wrong: a block decoder asks for states of a kind that masks at random do not
show, an answer that is clean up to some point and masked from there on. So half of the rows are
such. The weight `1 / p` of the diffusion loss lets rows of few masks dominate, so it is tamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from diffcache.eval.workshop.small.chain import MASK, WORLDS, ChainBatch, World, draw
from diffcache.eval.workshop.small.chain_llada import BLOCKS, CAUSAL, build_model, build_tokenizer
from diffcache.eval.workshop.small.export import save_language_model
from diffcache.eval.workshop.small.job import Job
from diffcache.files import write_json

WINDOW = 32  # tokens of a block that is partly decided
TAMED = 4  # masks that are added to those of a row, in its weight


def masks(count: int, world: World, generator: torch.Generator) -> Tensor:
    """Draw which tokens of answers are masked: half of them anywhere, half as a block decoder does.

    Args:
        count: Number of answers.
        world: Task.
        generator: Generator on the CPU.

    Returns:
        bool `[count, N]`.
    """
    share = torch.rand(count, 1, generator=generator)
    masked = torch.rand(count, world.length, generator=generator) < share
    cut = torch.randint(world.length, (count, 1), generator=generator)
    at = torch.arange(world.length)
    later = (at >= cut) & (masked | (at >= cut + WINDOW))
    return torch.where(torch.arange(count)[:, None] % 2 == 0, masked, later)


def block_masks(count: int, size: int, prompt: int, world: World, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw which tokens of answers are masked for attention that is causal over blocks.

    A block of each answer is decided: all before it is known, and what comes after it is not seen.

    Args:
        count: Number of answers.
        size: Tokens of a block.
        prompt: Tokens of a prompt, from whose first one blocks are counted.
        world: Task.
        generator: Generator on the CPU.

    Returns:
        Masked tokens, and those of them that are asked for, bool `[count, N]` each.
    """
    of = torch.arange(prompt, prompt + world.length) // size
    chosen = torch.randint(int(of[0]), int(of[-1]) + 1, (count, 1), generator=generator)
    share = torch.rand(count, 1, generator=generator)
    masked = (of > chosen) | ((of == chosen) & (torch.rand(count, world.length, generator=generator) < share))
    return masked, masked & (of == chosen)


class Chain(Job):
    """Fill in masked answers; every step draws new ones.

    A guide is a model without blocks, which reads from left to right: all of its answer is masked.
    """

    @property
    def world(self) -> World:
        """The task of the model."""
        return WORLDS[self.settings.model]

    @property
    def block(self) -> int | None:
        """Tokens that the model decides at a time, None for a guide."""
        return BLOCKS.get(self.settings.model)

    def build(self) -> nn.ModuleDict:
        """Build the model."""
        return nn.ModuleDict({"model": build_model(self.settings.model)})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the weighted cross-entropy of a step's masked tokens."""
        batch = draw(len(drawn["chosen"]), self.world, generator)
        logits, masked = self._predict(self.compile(models["model"]), batch, generator)
        error = cross_entropy(logits.float().mT, batch.answers, reduction="none")
        return ((error * masked).sum(1) / (masked.sum(1) + TAMED)).mean()

    def _predict(self, model: nn.Module, batch: ChainBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return logits of answers [B, N, V], and which of their tokens are asked for [B, N]."""
        length, more = self.world.length, {}
        if self.settings.model in CAUSAL and self.block is not None:
            prompt = batch.prompts.shape[1]
            hidden, masked = block_masks(len(batch.answers), self.block, prompt, self.world, generator)
            given = torch.cat([batch.prompts, batch.answers.masked_fill(hidden, MASK)], 1)
            at = torch.arange(given.shape[1]) // self.block
            seen = torch.zeros(len(at), len(at)).masked_fill(at[:, None] < at, -torch.inf)
            more = {"attention_mask": seen[None, None].to(given.device)}
        elif self.block is not None:
            masked = masks(len(batch.answers), self.world, generator)
            shown = batch.answers.masked_fill(masked, MASK)
            given = torch.cat([batch.prompts, shown], 1)
        else:
            masked = torch.ones_like(batch.answers, dtype=torch.bool)
            given = batch.ids[:, :-1]
        return model(input_ids=given, use_cache=False, **more).logits[:, -length:], masked

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure how many masked tokens are right, and of those whose left neighbor is known."""
        generator = torch.Generator().manual_seed(self.settings.seed + 1)
        batch = draw(64, self.world, generator)
        logits, masked = self._predict(models["model"], batch, generator)
        known = torch.ones_like(masked)
        if self.block is not None:
            known[:, 1:] = ~masked[:, :-1]
        right = (logits.argmax(-1) == batch.answers).float()
        return {"masked": float(right[masked].mean()), "frontier": float(right[masked & known].mean())}

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save model and tokenizer, with what a call needs."""
        tokenizer = build_tokenizer(self.world)
        save_language_model(models["model"], tokenizer, directory)
        if self.block is not None:
            (directory / "generation_config.json").unlink()  # it does not generate word by word
            call: dict[str, int] = {"length": self.world.length}
            if self.settings.model not in CAUSAL:
                call["block"] = self.block
            write_json(directory / "diffcache.json", {"call": call})

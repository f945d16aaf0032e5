"""Share of automata traces that the small language models get right without a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from diffcache.dllm import Schedule
from diffcache.eval.workshop.small.chain import HELD_OUT, WORLDS, draw
from diffcache.eval.workshop.small.chain_llada import BLOCKS
from diffcache.pipelines.diffusion_lm import DiffusionLM

_GROUP = 50  # prompts that are decoded together


@torch.no_grad()
def measure(
    name: str, model: LlamaForCausalLM, steps: int, samples: int, seed: int
) -> dict[str, Tensor]:
    """Return which traces are exactly right.

    Args:
        name: Name of the model.
        model: The model, in evaluation mode.
        steps: Forwards of an answer; the guide has one a token.
        samples: Number of prompts.
        seed: Seed of the draw, which no training reached.

    Returns:
        `whole_right`, bool `[N]`, and `token_right`, bool `[N, length]`.
    """
    world = WORLDS[name]
    batch = draw(samples, world, torch.Generator().manual_seed(HELD_OUT + seed))
    found = []
    for prompts in batch.prompts.split(_GROUP):
        if name in BLOCKS:
            schedule = Schedule(world.length, BLOCKS[name], steps)
            found.append(DiffusionLM(model).generate(prompts, schedule).ids)
        else:
            ids = model.generate(prompts, max_new_tokens=world.length, do_sample=False)
            found.append(ids[:, prompts.shape[1] :])
    right = torch.cat(found) == batch.answers
    return {"whole_right": right.all(1), "token_right": right}

"""Recall of the small language model over its contexts, with nothing dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from diffcache.pipelines.small.recall import BLOCK, HELD_OUT, Task, draw, score
from diffcache.pipelines.small.recall_llama import LENGTHS

_TOKENS = 8192  # of a batch
_LONGER = 4097  # than what was trained on


def _tasks() -> Sequence[Task]:
    """Return contexts half of facts, with at most 64, and one crowded.

    The first is that of the tables of key-value caches.
    """
    lengths = [513, *(length for length in (*LENGTHS, _LONGER) if length not in (33, 513))]
    counts = [(length, min((length - 1) // BLOCK // 2, 64)) for length in lengths]
    return [Task(length, facts, min(facts // 4, 8)) for length, facts in [*counts, (513, 115)]]


TASKS = _tasks()


@torch.no_grad()
def measure(model: LlamaForCausalLM, task: Task, samples: int, seed: int) -> dict[str, Tensor]:
    """Return which answers are exactly right.

    Args:
        model: The model, in evaluation mode.
        task: Task to draw.
        samples: Contexts, drawn in groups of about 8192 tokens.
        seed: Seed of the draw, which no training reached.

    Returns:
        `whole_right` (both values of an answer), `first_right` (a look-up) and `second_right` (a
        copy, given the first), bool [N, queries].
    """
    generator = torch.Generator().manual_seed(HELD_OUT + seed)
    group = max(_TOKENS // (task.context + BLOCK * task.queries), 1)
    hits = []
    for start in range(0, samples, group):
        batch = draw(min(group, samples - start), task, generator)
        logits = model(batch.ids, use_cache=False).logits
        hits.append(score(batch.answer_logits(logits), batch))
    right = torch.cat(hits)
    names = ("whole_right", "first_right", "second_right")
    return dict(zip(names, (right.all(-1), right[..., 0], right[..., 1]), strict=True))

"""What offline stages of recipes work on: contexts, and what a model sees of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kv.seen import Seen, capture, showing
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.observe import Observation, observe
from diffcache.kv.recipe import Recipe
from diffcache.pipelines.small.recall import RecallBatch, Task, draw

SEED = 3 << 41  # apart from those of every measurement


@dataclass(frozen=True)
class Samples:
    """Contexts with questions.

    Attributes:
        context: Tokens.
        facts: In a context.
        count: Contexts.
        questions: After each.
        seed: Of what is drawn.
    """

    context: int = 513
    facts: int = 64
    count: int = 16
    questions: int = 8
    seed: int = 0

    def each(self) -> Iterator[RecallBatch]:
        """Draw them, one at a time."""
        drawn = torch.Generator().manual_seed(SEED | self.seed)
        task = Task(self.context, self.facts, self.questions)
        for _ in range(self.count):
            yield draw(1, task, drawn)


@dataclass(frozen=True)
class Prepared:
    """Tables.

    Attributes:
        kind: What the tensors are: `"table"`, or the class they make together.
        tensors: By name.
        about: How they were found, plain values.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def seen_by(model: Any, ids: Tensor) -> list[Seen]:
    """Return what every attention layer sees of tokens, int64 [B, T]."""
    with showing(model):
        return capture(model, ids)


@torch.no_grad()
def read(model: Any, recipe: Recipe, ids: Tensor) -> KVCache:
    """Return the cache of tokens, int64 [B, T]; nothing is compressed yet."""
    cache = cache_for(model, recipe, mode="native")
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def observations(cache: KVCache) -> list[Observation]:
    """Return every layer of a cache as scorers see it, without queries."""
    layers = cache.store.layers
    return [observe(layer, len(layers)) for layer in layers]

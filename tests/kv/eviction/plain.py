"""A store fed with plain random tensors, as a model would feed it, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import pairwise

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.budget import Budget, Uniform
from diffcache.kv.life.on_request import OnRequest
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.base import Score
from diffcache.kv.store import KVStore

HEADS, GROUPS, SIZE = 2, 2, 8


class Text:
    """Queries [L, B, H * G, T, D], keys and values [L, B, H, T, D] of rows, row b without its first pad[b] tokens.

    `sharp`: layers and heads differ in how sharply they attend, instead of doing so alike.
    """

    def __init__(
        self,
        tokens: int,
        pad: Sequence[int] = (0,),
        layers: int = 1,
        heads: int = HEADS,
        groups: int = GROUPS,
        sharp: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        queries, keys, values = (
            torch.randn(layers, len(pad), count, tokens, SIZE, generator=generator)
            for count in (heads * groups, heads, heads)
        )
        steep = torch.linspace(1, 4, layers * heads).view(layers, 1, heads, 1, 1).repeat_interleave(groups, 2)
        self.q, self.k, self.v = queries * (steep if sharp else 2), keys, values
        self.pad, self.tokens, self.layers, self.heads = list(pad), tokens, layers, heads
        self.valid = torch.arange(tokens) >= torch.tensor(self.pad)[:, None]
        self.tags: Tensor | None = None  # int32 [T]

    def row(self, number: int) -> Text:
        """Return one row alone, without its padding."""
        other, pad = copy(self), self.pad[number]
        for name in ("q", "k", "v"):
            setattr(other, name, getattr(self, name)[:, number : number + 1, :, pad:])
        other.pad, other.tokens = [0], self.tokens - pad
        other.valid = self.valid[number : number + 1, pad:]
        return other

    def feed(self, store: KVStore, start: int, stop: int) -> list[Tensor]:
        """Run one forward over some of the tokens; return the attention of each layer."""
        part = self.valid[:, start:stop]
        valid = None if bool(part.all()) else part
        meta = {} if self.tags is None else {"tag": self.tags[None, None, start:stop]}
        store.begin(stop - start)
        found = []
        for index, layer in enumerate(store.layers):
            at = layer.seen
            q, k, v = (x[index, :, :, start:stop] for x in (self.q, self.k, self.v))
            layer.write(k, v, valid=valid, meta=meta)
            found.append(store.attend(index, Query(q, at, q.shape[-1] ** -0.5), valid))
        return found

    def after(self, recipe: Recipe, prompt: int | None = None) -> KVStore:
        """Return a store of a prompt and single tokens, when the next token is about to come."""
        store, first = KVStore(self.layers, recipe), prompt or self.tokens
        for start, stop in pairwise([0, first, *range(first + 1, self.tokens + 1)]):
            self.feed(store, start, stop)
        store.begin(1)
        return store

    def logits(self, number: int = 0, layer: int = 0, mask: bool = True) -> Tensor:
        """Return the logits of all queries of one row without its padding, [H, G, T, T], causal ones."""
        alone = self.row(number)
        q = alone.q[layer, 0].unflatten(0, (self.heads, -1))
        found = q @ alone.k[layer, 0][:, None].mT * SIZE**-0.5
        later = torch.ones(alone.tokens, alone.tokens, dtype=torch.bool).triu(1)
        return found.masked_fill(later, float("-inf")) if mask else found

    def attention(self, number: int = 0, layer: int = 0) -> Tensor:
        """Return causal attention of one row without its padding, [H, G, T, T]."""
        return self.logits(number, layer).softmax(-1)


def recipe(score: Score, budget: Budget | None = None) -> Recipe:
    """Return a recipe that scores, and drops only when it is asked to."""
    return Recipe("plain", score, budget or Uniform(1.0), TopK(), trigger=OnRequest())


def observed(score: Score, text: Text, steps: Sequence[int]) -> list[Observation]:
    """Return what a scorer sees of each layer after forwards of so many tokens."""
    store = KVStore(text.layers, recipe(score))
    start = 0
    for count in steps:
        text.feed(store, start, start + count)
        start += count
    assert start == text.tokens
    store._commit()
    return [store._observation(layer, store._rings[layer.index]) for layer in store.layers]


def scores(score: Score, text: Text, steps: Sequence[int]) -> list[Tensor]:
    """Return the scores of each layer, [B, H, S]."""
    return [score(seen).expand(seen.slots.k.shape[:3]) for seen in observed(score, text, steps)]

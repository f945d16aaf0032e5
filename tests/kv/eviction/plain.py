"""A store fed with plain random tensors, as a model would feed it, without a model."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Queries, keys and values of a few rows, row b without its first pad[b] tokens."""

    def __init__(self, tokens: int, pad: Sequence[int] = (0,), layers: int = 1, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int) -> Tensor:
            shape = (layers, len(pad), heads, tokens, SIZE)
            return torch.randn(shape, generator=generator)

        self.q, self.k, self.v = draw(HEADS * GROUPS) * 2, draw(HEADS), draw(HEADS)
        self.pad, self.tokens, self.layers = list(pad), tokens, layers
        self.valid = torch.arange(tokens) >= torch.tensor(self.pad)[:, None]

    def row(self, number: int) -> Text:
        """Return one row alone, without its padding."""
        other = object.__new__(Text)
        pad = self.pad[number]
        for name in ("q", "k", "v"):
            setattr(other, name, getattr(self, name)[:, number : number + 1, :, pad:])
        other.pad, other.tokens, other.layers = [0], self.tokens - pad, self.layers
        other.valid = self.valid[number : number + 1, pad:]
        return other

    def feed(self, store: KVStore, start: int, stop: int) -> None:
        """Run one forward over some of the tokens."""
        valid = self.valid[:, start:stop]
        store.begin(stop - start)
        for index in range(self.layers):
            layer = store.layers[index]
            at = layer.seen
            k, v = (x[index, :, :, start:stop] for x in (self.k, self.v))
            layer.write(k, v, valid=None if bool(valid.all()) else valid)
            q = self.q[index, :, :, start:stop]
            asked = Query(q, at, q.shape[-1] ** -0.5)
            store.attend(index, asked, None if bool(valid.all()) else valid)

    def attention(self, number: int = 0, layer: int = 0) -> Tensor:
        """Return causal attention of one row without its padding, [H, G, T, T]."""
        alone = self.row(number)
        q = alone.q[layer, 0].view(HEADS, GROUPS, alone.tokens, SIZE).double()
        found = torch.einsum("hgnd,hsd->hgns", q, alone.k[layer, 0].double()) * SIZE**-0.5
        later = torch.ones(alone.tokens, alone.tokens, dtype=torch.bool).triu(1)
        return found.masked_fill(later, float("-inf")).softmax(-1)


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

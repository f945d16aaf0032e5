"""Random queries, keys and values, and what recipes and plain loops make of them.

The references of this folder are written from the algorithms of the authors' code, on plain
tensors and lists. A test is called `test_official_` and the name of its recipe, and the first
paragraph of its docstring says in `docs/kv.md` what it compares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.recipe import Recipe
from diffcache.kv.store import KVStore

SIZE = 8
Kept = list[list[list[int]]]  # of each layer and head, the positions that are held


class Prompt:
    """Queries [L, 1, H * G, T, D], keys and values [L, 1, H, T, D] of one text."""

    def __init__(self, tokens: int, layers: int = 1, heads: int = 2, groups: int = 1, seed: int = 0) -> None:
        drawn = torch.Generator().manual_seed(seed)

        def draw(count: int) -> Tensor:
            return torch.randn(layers, 1, count, tokens, SIZE, generator=drawn)

        # Layers and heads differ in how sharply they attend.
        sharp = torch.linspace(1, 4, layers * heads).view(layers, 1, heads, 1, 1)
        self.q = draw(heads * groups) * sharp.repeat_interleave(groups, 2)
        self.k, self.v = draw(heads), draw(heads)
        self.tags: Tensor | None = None  # int32 [T]
        self.layers, self.heads, self.groups, self.tokens = layers, heads, groups, tokens

    def feed(self, store: KVStore, start: int, stop: int) -> list[Tensor]:
        """Run one forward over some of the tokens; return the attention of each layer."""
        store.begin(stop - start)
        found = []
        for index, layer in enumerate(store.layers):
            meta = {} if self.tags is None else {"tag": self.tags[None, None, start:stop]}
            layer.write(*(x[index, :, :, start:stop] for x in (self.k, self.v)), meta=meta)
            asked = Query(self.q[index, :, :, start:stop], start, SIZE**-0.5)
            found.append(store.attend(index, asked))
        return found

    def after(self, recipe: Recipe, prompt: int | None = None) -> KVStore:
        """Return a store of a prompt and single tokens, when the next token is about to come."""
        store = KVStore(self.layers, recipe)
        first = prompt or self.tokens
        self.feed(store, 0, first)
        for token in range(first, self.tokens):
            self.feed(store, token, token + 1)
        store.begin(1)
        return store

    def logits(self, layer: int, mask: bool = True) -> Tensor:
        """Return the logits of all queries, [H, G, T, T], causal ones."""
        q = self.q[layer, 0].unflatten(0, (self.heads, self.groups))
        found = q @ self.k[layer, 0][:, None].mT * SIZE**-0.5
        late = torch.ones(self.tokens, self.tokens, dtype=torch.bool).triu(1)
        return found.masked_fill(late, float("-inf")) if mask else found

    def attention(self, layer: int) -> Tensor:
        """Return causal attention, [H, G, T, T]."""
        return self.logits(layer).softmax(-1)


def held(store: KVStore) -> Kept:
    """Return the positions that a store holds."""
    found = []
    for layer in store.layers:
        slots = layer.read()
        pos = slots.pos.expand(slots.k.shape[:3])[0]
        found.append([sorted(head[head >= 0].tolist()) for head in pos])
    return found


def rows(store: KVStore, layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer in order of position, [H, S, D]."""
    slots = store.layers[layer].read()
    pos = slots.pos.expand(slots.k.shape[:3])[0]
    order = pos.argsort(-1)[..., None].expand(-1, -1, SIZE)
    return slots.k[0].gather(1, order), slots.v[0].gather(1, order)


def pool(row: list[float], kernel: int, how: str) -> list[float]:
    """Pool over neighbors; beyond the ends there is nothing, which counts in the average as 0."""
    near = [row[max(place - kernel // 2, 0) : place + kernel // 2 + 1] for place in range(len(row))]
    return [max(few) if how == "max" else sum(few) / kernel for few in near]


def best(row: list[float], count: int) -> list[int]:
    """Return the places of the highest numbers, of equals (which topk leaves open) the later."""
    return sorted(sorted(range(len(row)), key=lambda place: (-row[place], -place))[:count])

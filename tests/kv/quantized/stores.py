"""Stores of one recipe, written to as a model writes."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.quantized import kivi
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore

GROUP, RESIDUAL, SIZE = 4, 8, 8


def draw(batch: int, count: int, seed: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 2, count, size, generator=drawn) for _ in "kv")  # type: ignore[return-value]


def write(store: KVStore, count: int, seed: int, batch: int = 1, size: int = SIZE) -> None:
    """Do what a forward does: settle, write, ask."""
    store.begin(count)
    for layer in store.layers:
        k, v = draw(batch, count, seed * 100 + layer.index, size)
        start = layer.seen
        layer.write(k, v)
        q = torch.randn(batch, 4, count, size, generator=torch.Generator().manual_seed(seed))
        store.attend(layer.index, Query(q, start, size**-0.5))


def grid(x: Tensor, axis: int, bits: int = 2) -> Tensor:
    """Round one group to its grid, as the paper has it."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float()
    low = low.half().float()
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


def small_kivi() -> Recipe:
    return kivi(2, group=GROUP, residual=RESIDUAL)


def coded(layer: KVLayer) -> Coded:
    (segment,) = layer.segments
    assert isinstance(segment, Coded)
    return segment


def held_codes(store: KVStore) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return decoded keys and values of coded slots, by layer and position."""
    found = {}
    for layer in store.layers:
        for segment in layer.segments:
            if not segment.coded:
                continue
            slots = segment.read()
            count = segment.v.decode().shape[2]  # type: ignore[attr-defined]
            for head in range(2):
                pos = slots.pos[0].expand(2, -1)[head]
                for place, at in enumerate(pos.tolist()):
                    if at >= 0:
                        value = slots.v[0, head, place] if place < count else None
                        found[layer.index, head, at] = (slots.k[0, head, place], value)
    return found  # type: ignore[return-value]

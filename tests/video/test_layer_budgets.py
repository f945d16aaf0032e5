"""Budgets of layers: who looks far back holds what the others save."""

import torch

from diffcache.kv.attend import Query
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.video import LayerBudgets

UNIT, CHUNK, WIDE = 16, 3, 2  # tokens, frames, the layer that looks far back


def fill(store: KVStore, wide: int, seed: int) -> None:
    """Write a chunk into every layer, and ask: one layer attends evenly, the others to its own."""
    count = CHUNK * UNIT
    store.begin(count)
    generator = torch.Generator().manual_seed(seed)
    for layer in store.layers:
        k = torch.randn(1, 2, count, 6, generator=generator)
        layer.write(k, k)
        at = torch.arange(layer.seen - count, layer.seen)
        q = torch.zeros_like(k) if layer.index == wide else 30 * layer.rotate(k, at)
        store.attend(layer.index, Query(q, layer.seen - count, 1.0, causal=False))


def test_the_layer_that_looks_far_back_holds_what_the_others_save_for_good() -> None:
    rotary = RotaryND(torch.ones(3, dtype=torch.float64), axes=(0, 1, 2), grid=(4, 4))
    policy = LayerBudgets(window=8, recent=3, drafters=0.25, reduction=0.5, sinks=1)
    store = KVStore(4, policy.recipe(UNIT), rotary=[rotary] * 4)
    for chunk in range(12):
        fill(store, WIDE if chunk < 6 else 0, chunk)  # later another one looks far back
        frames = [layer.held / UNIT for layer in store.layers]
        assert sum(frames) <= 4 * (8 + CHUNK)
        if chunk >= 2:
            assert [frames[layer] for layer in (0, 1, 3)] == [4 + CHUNK] * 3
    assert frames[WIDE] == 8 + 3 * 4 + CHUNK
    for layer in store.layers:
        pos = layer.meta()["pos"][0, 0]
        assert set(range(UNIT)) <= set(pos.tolist())  # the first frame stays, and the latest chunk
        assert set(range(33 * UNIT, 36 * UNIT)) <= set(pos.tolist())

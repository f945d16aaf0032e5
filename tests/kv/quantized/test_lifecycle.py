"""Times at which tokens reach codecs, against a re-implementation; codes then never change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import tensors
from diffcache.kv.recipes.quantized import (
    gear,
    kivi,
    mikv,
    mustafar,
    rotatekv,
    vidkv,
    xquant,
    zipcache,
)
from diffcache.kv.store import KVStore
from tests.kv.quantized.stores import (
    GROUP,
    RESIDUAL,
    SIZE,
    coded,
    draw,
    grid,
    held_codes,
    small_kivi,
    write,
)


class Kivi:
    """KIVI as algorithm 1 states it, a token at a time."""

    def __init__(self) -> None:
        empty = torch.zeros(1, 2, 0, SIZE)
        self.k, self.v, self.new_k, self.new_v = empty, empty, empty, empty

    def add(self, k: Tensor, v: Tensor) -> None:
        """Append one token, after what is full was coded."""
        if self.new_k.shape[2] == RESIDUAL:
            blocks = self.new_k.unflatten(2, (-1, GROUP))
            self.k = torch.cat([self.k, grid(blocks, 3).flatten(2, 3)], 2)
            self.new_k = self.new_k[:, :, :0]
        if self.new_v.shape[2] > RESIDUAL:
            oldest = self.new_v[:, :, :1].unflatten(3, (-1, GROUP))
            self.v = torch.cat([self.v, grid(oldest, 4).flatten(3)], 2)
            self.new_v = self.new_v[:, :, 1:]
        self.new_k = torch.cat([self.new_k, k], 2)
        self.new_v = torch.cat([self.new_v, v], 2)


def test_kivi_is_what_algorithm_1_gives_token_by_token() -> None:
    store, theirs = KVStore(1, small_kivi()), Kivi()
    for step in range(45):
        write(store, 1, step)
        k, v = draw(1, 1, step * 100)
        theirs.add(k, v)
        slots = store.layers[0].read()
        exact = coded(store.layers[0]).exact if store.layers[0].segments else None
        waits = 0 if exact is None else exact.shape[2]
        assert store.layers[0].tail.length == theirs.new_k.shape[2] == step % RESIDUAL + 1
        # The newest token comes after the oldest was coded: one more than R are there until then.
        if theirs.v.shape[2] or waits:
            assert waits + store.layers[0].tail.length == theirs.new_v.shape[2]
        assert torch.equal(slots.pos, torch.arange(step + 1).view(1, 1, -1))
        assert torch.allclose(slots.k, torch.cat([theirs.k, theirs.new_k], 2), atol=1e-6)
        assert torch.allclose(slots.v, torch.cat([theirs.v, theirs.new_v], 2), atol=1e-6)


@pytest.mark.parametrize("tokens", [3, 8, 9, 17, 24, 30])
def test_a_prompt_leaves_t_mod_r_keys_and_r_values(tokens: int) -> None:
    store = KVStore(1, small_kivi())
    write(store, tokens, 0)
    store.begin(0)
    layer = store.layers[0]
    exact = coded(layer).exact if layer.segments else None
    assert layer.tail.length == tokens % RESIDUAL
    waits = 0 if exact is None else exact.shape[2]
    assert waits + layer.tail.length == min(tokens, RESIDUAL)


RECIPES = {
    "kivi": small_kivi(),
    "gear": gear(group=4, buffer=8, rank=2),
    "rotatekv": rotatekv(group=4, recent=4, sinks=2),
    "vidkv": vidkv(group=4, residual=8),
    "xquant": xquant(group=4, residual=8),
    "mustafar": mustafar(recent=4),
    "zipcache": zipcache(every=10),
    "mikv": mikv(budget=12, every=4, queries=4, group=4),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_coded_never_changes(name: str) -> None:
    store = KVStore(2, RECIPES[name], rotary=[_still(), _still()])
    write(store, 21, 0)
    before: dict[Any, Any] = {}
    for step in range(1, 41):
        write(store, 1, step)
        if step % 10 == 0:
            now = held_codes(store)
            assert before.keys() <= now.keys()
            for at, (k, v) in before.items():
                assert torch.equal(k, now[at][0]), (name, at)
                assert v is None or torch.equal(v, now[at][1]), (name, at)
            before = now
    assert before


def _still() -> Any:
    from diffcache.kv.rotary import Rotary

    return Rotary(torch.zeros(0))


# bytes -----------------------------------------------------------------------------------------


def test_kivi_at_2_bits_holds_a_fifth_of_bfloat16() -> None:
    store = KVStore(1, kivi())
    layer, worst = store.layers[0], 0.0
    for step in range(131):
        count = 4095 if not step else 1
        store.begin(count)
        k = torch.randn(1, 2, count, 32, generator=torch.Generator().manual_seed(step))
        layer.write(k.bfloat16(), k.bfloat16())
        if step:
            worst = max(worst, store.nbytes / (store.seen * 2 * 2 * 32 * 2))
    assert 0.19 < worst < 0.22
    assert not coded(layer).meta  # positions that follow one another cost nothing


def test_bits_of_a_slot_are_counted() -> None:
    """ZipCache: 4 and 2 bits a channel, 32 bits for the values of a token, and rows of scales for each part."""
    store = KVStore(1, zipcache(0.5, every=16))
    write(store, 64, 0, size=32)
    store.begin(1)
    layer = store.layers[0]
    assert [(s.level, s.width) for s in layer.segments] == [(1, 32), (2, 32)]
    for segment, bits in zip(layer.segments, (4, 2), strict=True):
        rows = 2 * 32 * (2 + 1) * 2  # key scale and minimum, value factor, of every channel
        codes = 2 * 2 * 32 * 32 * bits // 8
        vectors = 32 * 2 * 2
        pos = 2 * 32 * 4
        counted = sum(t.numel() * t.element_size() for t in tensors(segment))
        assert counted == rows + codes + vectors + pos


def test_mikv_stores_its_balancer_once() -> None:
    store = KVStore(1, mikv(budget=8, every=4, queries=4, group=4))
    write(store, 20, 0)
    for step in range(1, 30):
        write(store, 1, step)
    first = next(s for s in store.layers[0].segments if s.level == 1)
    assert first.width >= 30
    assert first.k.factor.values.shape[2] == 1  # type: ignore[attr-defined]

"""Times at which tokens reach codecs, against a re-implementation; codes then never change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffcache.kv.codec.base import tensors
from diffcache.kv.recipes.quantized import gear, kivi, mikv, mustafar, rotatekv, vidkv, xquant, zipcache
from diffcache.kv.store import KVStore
from tests.kv.quantized.stores import RESIDUAL, coded, held_codes, small_kivi, write


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

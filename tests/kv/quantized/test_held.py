"""Codecs of a layer: with eviction, ragged rows, sinks, forks and batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.held import ByLayer, Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.layer import KVLayer
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import snapkv
from diffcache.kv.recipes.quantized import xquant
from diffcache.kv.segment import Coded, Dense, Flat
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from tests.kv.quantized.stores import GROUP, SIZE, coded, draw, grid, held_codes, small_kivi, write


def test_evicting_first_and_then_coding_is_coding_what_was_kept() -> None:
    both = KVStore(1, snapkv(12, window=4, kernel=1) | small_kivi())
    alone = KVStore(1, snapkv(12, window=4, kernel=1))
    for store in (both, alone):
        write(store, 30, 0)
        store.begin(1)
    kept = alone.layers[0].read()
    order = kept.pos.argsort(-1)
    segment = coded(both.layers[0])
    assert segment.width == 8 and both.layers[0].tail.length == 4
    found = both.layers[0].read()
    assert torch.equal(found.pos, kept.pos.gather(2, order))
    sorted_ = kept.k.gather(2, order[..., None].expand_as(kept.k))
    blocks = sorted_[:, :, :8].unflatten(2, (-1, GROUP))
    assert torch.allclose(found.k[:, :, :8], grid(blocks, 3).flatten(2, 3), atol=1e-6)
    assert torch.equal(found.k[:, :, 8:], sorted_[:, :, 8:])


def test_a_prompt_in_chunks_is_scored_before_it_is_coded() -> None:
    whole, chunks = (KVStore(1, snapkv(12, window=4, kernel=1) | small_kivi()) for _ in range(2))
    k, v = draw(1, 30, 0)
    q = torch.randn(1, 4, 30, SIZE, generator=torch.Generator().manual_seed(0))
    for store, ends in ((whole, (0, 30)), (chunks, (0, 16, 30))):
        for start, end in itertools.pairwise(ends):
            store.begin(end - start)
            store.layers[0].write(k[:, :, start:end], v[:, :, start:end])
            store.attend(0, Query(q[:, :, start:end], start, 1.0))
        store.begin(1)
    one, two = (store.layers[0].read() for store in (whole, chunks))
    assert torch.equal(one.pos, two.pos)
    assert torch.equal(one.k, two.k) and torch.equal(one.v, two.v)


def test_evicting_later_keeps_the_codes_and_codes_waiting_values_first() -> None:
    store = KVStore(1, snapkv(12, window=4, kernel=1) | small_kivi())
    write(store, 40, 0)
    for step in range(1, 10):
        write(store, 1, step)
    before = held_codes(store)
    waits = coded(store.layers[0]).exact
    assert waits is not None
    store.layers[0].summary = None
    write(store, 6, 99)  # a second prompt
    store.begin(1)
    after = held_codes(store)
    shared = before.keys() & after.keys()
    assert shared
    for at in shared:
        assert torch.equal(before[at][0], after[at][0])
        assert before[at][1] is None or torch.equal(before[at][1], after[at][1])


def test_ragged_rows_are_coded_with_their_latest_tokens_exact() -> None:
    codec = Pair(GroupQuant(8, "tokens", 4), GroupQuant(8, "channels", 4), 4, recent=3)
    layer = KVLayer()
    k, v = draw(1, 9, 0)
    pos = torch.stack([torch.arange(9), torch.tensor([-1, -1, -1, 3, -1, 5, 6, 7, 8])])[None]
    layer.segments = [Flat.of(Slots(k, v, {"pos": pos.int()}))]
    layer.seen = 9
    layer.stats = {"mass": layer.read().pos.float()}
    codec.flush([layer])
    (segment,) = layer.segments
    assert segment.width == 4
    assert layer.tail.read().pos.tolist() == [[[4, 5, 6, 7, 8], [3, 5, 6, 7, 8]]]  # type: ignore[union-attr]
    assert torch.equal(layer.stats["mass"].long(), layer.read().pos.long())
    found = layer.read()
    for head in range(2):
        for place, at in enumerate(found.pos[0, head].tolist()):
            if at >= 0:
                assert torch.allclose(found.k[0, head, place], k[0, head, at], atol=0.03)


def test_empty_slots_do_not_widen_the_range_of_a_group() -> None:
    codec = Pair(GroupQuant(2, "tokens", 4), GroupQuant(2, "channels", 4), 4)
    k, v = draw(1, 4, 0)
    loud, valid = k.clone(), torch.tensor([[False, True, True, True]])
    loud[:, :, 0] = 1000
    one, two = KVLayer(), KVLayer()
    one.write(loud, v, valid=valid)
    two.write(k.index_select(2, torch.tensor([1, 1, 2, 3])), v, valid=valid)
    codec.flush([one])
    codec.flush([two])
    assert torch.equal(one.read().k[:, :, 1:], two.read().k[:, :, 1:])


@pytest.mark.parametrize("valid", [None, [False, False, True, True, True, True, True, True]])
def test_sinks_stay_exact_in_every_row(valid: list[bool] | None) -> None:
    codec = Pair(GroupQuant(2, "channels", 4), GroupQuant(2, "channels", 4), 2, sinks=2)
    layer = KVLayer()
    k, v = draw(2, 8, 0)
    rows = None if valid is None else torch.tensor([[True] * 8, valid])
    layer.write(k, v, valid=rows)
    layer.stats = {"mass": layer.read().pos.float().expand(2, 2, 8).clone()}
    codec.flush([layer])
    apart, rest = layer.segments
    assert isinstance(apart, Dense) and isinstance(rest, Coded)
    first = [0, 0 if valid is None else 2]
    assert apart.slots.pos[:, 0].tolist() == [[at, at + 1] for at in first]
    for row, at in enumerate(first):
        assert torch.equal(apart.slots.k[row], k[row, :, at : at + 2])
    assert torch.equal(layer.stats["mass"].long(), layer.read().pos.expand(2, 2, 8).long())
    layer.write(*draw(2, 2, 1))
    codec.flush([layer])
    assert [type(s) for s in layer.segments] == [Dense, Coded]


def test_a_rollback_takes_back_the_tail_alone_and_forks_are_apart() -> None:
    store = KVStore(1, small_kivi())
    write(store, 20, 0)
    store.begin(3)
    there = store.layers[0].read()
    other = store.fork()
    store.layers[0].write(*draw(1, 3, 7))
    store.rollback(3)
    for each in (store, other):
        found = each.layers[0].read()
        assert torch.equal(found.k, there.k) and torch.equal(found.v, there.v)
    write(other, 9, 5)
    assert torch.equal(store.layers[0].read().k, there.k)
    with pytest.raises(ValueError, match="settled"):
        store.rollback(5)


def test_a_codec_for_each_layer() -> None:
    codec = ByLayer((None, Pair(Exact(), Exact(), 4)))
    store = KVStore(2, Recipe(codec=codec))
    write(store, 9, 0)
    store.begin(1)
    assert not store.layers[0].segments
    assert coded(store.layers[1]).width == 8
    with pytest.raises(ValueError, match="none for layer 2"):
        codec.flush([KVLayer(2)])
    with pytest.raises(ValueError, match="no rung"):
        codec.hold(store.layers[0].read(), 1)
    with pytest.raises(ValueError, match="scope"):
        ByLayer((replace(xquant().codec, scope=2),))  # type: ignore[type-var]

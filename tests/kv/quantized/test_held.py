"""Codecs of a layer: times at which tokens reach them, eviction, ragged rows, sinks, and `generate`."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.eval.workshop.kv import oracle
from diffcache.kv.attend import Query
from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.held import ByLayer, Pair
from diffcache.kv.codec.joined_layers import Single, Together
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.hf.cache import cache_for
from diffcache.kv.layer import KVLayer
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import snapkv
from diffcache.kv.recipes.low_rank import minicache, xkv
from diffcache.kv.recipes.quantized import gear, kivi, mikv, mustafar, rotatekv, vidkv, xquant, zipcache
from diffcache.kv.segment import Coded, Dense, Flat
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from diffcache.kv.view import Unread
from tests.kv.tiny import SHORT, WAYS, generate, given, llama, prompts, same, stock

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


@pytest.mark.parametrize("tokens", [3, 9, 24])
def test_a_prompt_leaves_t_mod_r_keys_and_r_values(tokens: int) -> None:
    store = KVStore(1, small_kivi())
    write(store, tokens, 0)
    store.begin(0)
    layer = store.layers[0]
    exact = coded(layer).exact if layer.segments else None
    assert layer.tail.length == tokens % RESIDUAL
    waits = 0 if exact is None else exact.shape[2]
    assert waits + layer.tail.length == min(tokens, RESIDUAL)


TIMED = {
    "kivi": small_kivi(),
    "gear": gear(group=4, buffer=8, rank=2),
    "rotatekv": rotatekv(group=4, recent=4, sinks=2),
    "vidkv": vidkv(group=4, residual=8),
    "xquant": xquant(group=4, residual=8),
    "mustafar": mustafar(recent=4),
    "zipcache": zipcache(every=10),
    "mikv": mikv(budget=12, every=4, queries=4, group=4),
}


@pytest.mark.parametrize("name", TIMED)
def test_what_is_coded_never_changes(name: str) -> None:
    store = KVStore(2, TIMED[name], rotary=[_still(), _still()])
    write(store, 21, 0)
    before: dict[Any, Any] = {}
    for step in range(1, 31):
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


RECIPES = {
    "kivi": kivi(4, group=8, residual=16),
    "rotatekv": rotatekv(4, group=8, heads=2, recent=8),
    "xquant": xquant(group=8, residual=16),
    "xkv": xkv(block=16),
    "minicache": minicache(block=16, bits=4, skip=2),
    "gear": gear(4, group=4, buffer=4),
    "mustafar": mustafar(0.5, recent=2),
}
EXACT = Pair(Exact(), Exact(), 8, recent=3)
PLUMBING: dict[str, Recipe] = {
    "pair": Recipe(codec=Pair(Exact(), Exact(), 8, slide=True)),
    "whole": Recipe(codec=Pair(Exact(), Exact(), 8, whole=True)),
    "layers": Recipe(codec=Together(Single(Exact()), Single(Exact()), 3, 8)),
    "by layer": Recipe(codec=ByLayer((EXACT, None, EXACT, EXACT))),
}


@pytest.fixture(scope="module")
def theirs(model: Any) -> dict[str, Any]:
    return {way: stock(model, given(way), **settings) for way, settings in WAYS.items()}


@pytest.mark.parametrize("codec", [Pair(Exact(), Exact(), 4, slide=True), PLUMBING["layers"].codec])
def test_coding_what_is_left_changes_nothing_of_what_was_dropped(codec: Any) -> None:
    model = llama().double()
    recipe = snapkv(20) | Recipe(codec=codec)
    out, cache, log = oracle.run(model, recipe, prompts(), **SHORT)
    assert all(layer.segments for layer in cache.store.layers)
    same(out, oracle.expected(model, cache, log, prompts(), **SHORT), 1e-6)


@pytest.mark.parametrize(("turn", "name"), list(enumerate(PLUMBING)))
def test_exact_codecs_are_stock_bit_for_bit(model: Any, theirs: dict[str, Any], turn: int, name: str) -> None:
    for number, (way, settings) in enumerate(WAYS.items(), turn):  # all ways, in each mode by turns
        cache = cache_for(model, PLUMBING[name], mode=("stock", "native")[number % 2])
        ours = generate(model, cache, given(way), **settings)
        assert cache.store.layers[0].segments
        same(ours, theirs[way])


@pytest.mark.parametrize("name", RECIPES)
def test_stock_and_native_modes_say_the_same(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native mode multiplies codes as they are held, and stock mode decodes them."""
    inputs = {key: value[1:2] for key, value in prompts().items()}  # without padding
    held: list[int] = []
    whole = Unread.held
    monkeypatch.setattr(Unread, "held", lambda self: held.append(1) or whole(self))
    outs = [generate(model, cache_for(model, RECIPES[name], mode=mode), inputs) for mode in ("stock", "native")]
    assert len(held) == (0 if name in ("kivi", "xquant", "minicache") else 12)
    same(*outs, tolerance=2e-4)

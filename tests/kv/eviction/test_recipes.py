"""Recipes that drop slots: budgets, triggers, windows, bounds of the loss, and probes on request."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import Recipe, epicache, kvzip, prefixkv, razor_attention, windowkv
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.learn.scalekv import capacities
from diffcache.kv.life.on_request import compress_by_probe, prefill_by_blocks
from diffcache.kv.merge import Compensation
from diffcache.kv.recipes import eviction
from diffcache.kv.segment import Flat
from diffcache.kv.store import KVStore
from tests.kv.eviction.plain import Text
from tests.kv.eviction.seen import observed
from tests.kv.tiny import GREEDY, prompts, row


def widths(recipe: Recipe, prompt: int, steps: int) -> list[int]:
    """Return the slots held after each token that is generated."""
    text, store, found = Text(prompt + steps), KVStore(1, recipe), []
    text.feed(store, 0, prompt)
    for step in range(steps):
        text.feed(store, prompt + step, prompt + step + 1)
        found.append(store.layers[0].held)
    return found


def test_triggers_fire_when_they_should() -> None:
    lazy = widths(eviction.lazy_eviction(12, lag=4), 20, 12)
    assert lazy == [13, 14, 15, 16] * 3
    full = widths(eviction.scissorhands(16, history=8, recent=2), 10, 16)
    # 10 and one more each time; at 17 slots half of 16 stay.
    assert full == [11, 12, 13, 14, 15, 16, 17, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    steady = widths(prefixkv(12, sinks=2, distance=4, mode="official"), 20, 6)
    assert steady == [13] * 6
    once = widths(prefixkv(12, sinks=2), 20, 6)
    assert once == [13, 14, 15, 16, 17, 18]
    each = widths(eviction.keyformer(12), 20, 6)
    assert each == [13] * 6


def test_layers_of_a_group_keep_the_same_windows(exact: Any) -> None:
    inputs = prompts()
    cache = cache_for(exact, windowkv(16, window=4, size=4, group=2, beta=2.0), mode="native")
    exact.generate(**inputs, past_key_values=cache, **GREEDY)
    detach(exact)
    pos = [layer.read().pos for layer in cache.store.layers]
    assert torch.equal(pos[0], pos[1]) and torch.equal(pos[2], pos[3])
    assert pos[0].shape[2] > pos[2].shape[2]


def test_scales_hold_what_their_table_says() -> None:
    scales = ((1, 1), (2, 2), (4, 4), (8, 8))
    index = torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.9, 0.9, 0.1, 0.1]])
    table = capacities(index, 20, drafters=1, reduction=0.8)
    store = KVStore(2, eviction.scalekv(scales=scales, table=table))
    text, start = Text(85 + 1, pad=(0, 0), layers=2), 0
    before: list[int] = []
    for scale, (height, width) in enumerate(scales):
        text.feed(store, start, start + height * width)
        start += height * width
        if scale:  # what was left of the scales before
            for layer in range(2):
                earlier = min(table[layer][scale - 1], start - height * width)
                assert store.layers[layer].held == min(earlier, before[layer]) + height * width
        before = [layer.held for layer in store.layers]
    text.feed(store, start, start + 1)
    assert [layer.held for layer in store.layers] == [table[0][3] + 1, table[1][3] + 1]
    assert table[0][3] == 4 and table[1][3] == 36


RAZOR = ((True, False),)


def attended(store: KVStore, q: Tensor) -> Tensor:
    return store.attend(0, Query(q, store.seen, q.shape[-1] ** -0.5))


def test_one_slot_stands_for_many_alike_exactly() -> None:
    store = KVStore(1, razor_attention(RAZOR, 10, least=0, sinks=4))
    k, v = torch.randn(2, 1, 2, 60, 8, dtype=torch.float64).unbind()
    k[:, 1, 4:50], v[:, 1, 4:50] = k[:, 1, 4:5], v[:, 1, 4:5]
    store.begin(60)
    store.layers[0].write(k, v)
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    wanted = attended(store, q)
    store.compress()
    slots = store.layers[0].read()
    assert slots.valid.sum(-1).tolist() == [[60, 4 + 1 + 10]]
    torch.testing.assert_close(attended(store, q), wanted, rtol=1e-6, atol=1e-6)
    logn = slots.meta["logn"][0, 1]
    assert math.isclose(float(logn.max()), math.log(46), rel_tol=1e-6)
    (segment,) = store.layers[0].segments
    assert isinstance(segment, Flat)
    segment.meta["logn"].zero_()
    assert (attended(store, q) - wanted).abs().max() > 1e-2  # the multiplicity is what does it


def test_nothing_that_goes_changes_nothing() -> None:
    k = torch.randn(1, 2, 6, 4)
    seen = observed(k, k)
    plan = torch.zeros(1, 2, 6, dtype=torch.int8)
    slots, after = Compensation()(seen, torch.zeros(1, 2, 6), plan)
    assert slots is seen.slots and torch.equal(after, plan)


def forward(model: Any) -> Callable[[Tensor, KVCache], object]:
    def run(ids: Tensor, cache: KVCache) -> object:
        with torch.no_grad():
            return model(ids, past_key_values=cache)

    return run


def test_a_probe_keeps_what_it_attends_to_most(exact: Any) -> None:
    ids, probe = prompts(1, 30)["input_ids"][:, 17:], torch.arange(40, 46)[None]
    ids = torch.cat([ids, ids + 1], 1)
    run = forward(exact)
    cache = cache_for(exact, epicache(9), mode="native")
    run(ids, cache)
    before = cache.store.seen
    compress_by_probe(cache, lambda fork: run(probe, fork))
    assert cache.store.seen == before
    detach(exact)
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        full = exact(torch.cat([ids, probe], 1), output_attentions=True)
    exact.set_attn_implementation("sdpa")
    for layer, attention in zip(cache.store.layers, full.attentions, strict=True):
        most = attention[0, :, ids.shape[1] :, : ids.shape[1]].amax(1).view(2, 2, -1).amax(1)
        for head in range(2):
            expected = most[head].argsort(descending=True)[:9].sort().values
            assert torch.equal(layer.read().pos[0, head].long(), expected)
        assert not layer.stats


def test_a_conversation_in_blocks_never_holds_more(exact: Any) -> None:
    ids, probe = prompts(2, 48)["input_ids"], torch.arange(40, 46)[None].expand(2, -1)
    run, most = forward(exact), []
    cache = cache_for(exact, epicache(10, weights=(4, 3, 2, 1), sinks=1), mode="native")

    def watched(part: Tensor, fork: KVCache) -> object:
        found = run(part, fork)
        most.append([layer.held for layer in fork.store.layers])
        return found

    prefill_by_blocks(cache, watched, ids, probe, 12)
    detach(exact)
    assert [layer.held for layer in cache.store.layers] == [16, 12, 8, 4]
    assert cache.store.seen == 48 and max(map(max, most)) <= 16 + 12 + 6
    for layer in cache.store.layers:
        assert bool((layer.read().pos[..., 0] == 0).all())
    with pytest.raises(ValueError, match="block=0"):
        prefill_by_blocks(cache, watched, ids, probe, 0)


def test_several_probes_and_heads_of_their_own_size(exact: Any) -> None:
    ids = row(prompts(), 1)["input_ids"]
    run = forward(exact)
    cache = cache_for(exact, kvzip(12, sinks=2), mode="native")
    run(ids, cache)
    compress_by_probe(cache, lambda fork: run(ids[:, :20], fork), lambda fork: run(ids[:, 20:], fork))
    detach(exact)
    lengths = torch.stack([(layer.read().pos >= 0).sum(-1)[0] for layer in cache.store.layers])
    assert bool((lengths.sum(1) == 24).all()) and len(lengths.unique()) > 1


@pytest.mark.parametrize("made", [kvzip(12), epicache(12)], ids=["kvzip", "epicache"])
def test_going_on_without_a_probe_is_refused(exact: Any, made: Any) -> None:
    inputs = row(prompts(), 1)
    cache = cache_for(exact, made)
    with pytest.raises(ValueError, match="drops nothing by itself: run the prompt, ask with"):
        exact.generate(**inputs, past_key_values=cache, **GREEDY)
    cache.reset()
    run, ids = forward(exact), inputs["input_ids"]
    run(ids[:, :-1], cache)
    compress_by_probe(cache, lambda fork: run(ids[:, :-1], fork))
    exact.generate(**inputs, past_key_values=cache, **GREEDY)
    run(ids[:, :5], cache)  # a later question is not asked about
    run(ids[:, :1], cache)
    detach(exact)
    assert cache.store.layers[0].held < 48

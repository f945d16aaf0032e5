"""Caches that are compressed by probes, when they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.life.on_request import compress_by_probe, prefill_by_blocks
from diffcache.kv.recipes.eviction import epicache, kvzip, snapkv
from diffcache.kv.score.probe import Asked
from tests.kv.tiny import GREEDY, llama, prompts, row


@pytest.fixture(scope="module")
def exact() -> Any:
    return llama().double()


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


def test_probes_are_checked(exact: Any) -> None:
    run, ids = forward(exact), prompts(1, 20)["input_ids"][:, 17:]
    cache = cache_for(exact, snapkv(4, window=2), mode="native")
    run(ids, cache)
    with pytest.raises(ValueError, match="needs a recipe that scores by"):
        compress_by_probe(cache, lambda fork: run(ids, fork))
    asked = cache_for(exact, epicache(4), mode="native")
    run(ids, asked)
    with pytest.raises(ValueError, match="0 probes"):
        compress_by_probe(asked)
    with pytest.raises(ValueError, match="without the fork"):
        compress_by_probe(asked, lambda fork: None)
    with pytest.raises(ValueError, match="compress_by_probe"):
        asked.store.compress()
    detach(exact)
    assert asked.store.recipe.score == Asked()


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

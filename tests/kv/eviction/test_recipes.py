"""Recipes inside generate: budgets, triggers, windows and algorithms of their own, and a conversation in episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.learn.scalekv import capacities
from diffcache.kv.plan import Windows
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import (
    adakv,
    criticalkv,
    keyformer,
    knorm,
    lazy_eviction,
    prefixkv,
    scalekv,
    scissorhands,
    snapkv,
    windowkv,
)
from diffcache.kv.recipes.streaming import streaming_llm
from diffcache.kv.store import KVStore
from tests.kv.eviction.plain import Text
from tests.kv.examples import examples
from tests.kv.tiny import GREEDY, llama, prompts, row


@pytest.fixture(scope="module")
def exact() -> Any:
    return llama().double()


def test_streaming_llm_is_a_model_of_one_layer_on_what_is_kept() -> None:
    """Positions follow one another, whatever was dropped: only so is this a fresh prompt."""
    model = llama(num_hidden_layers=1).double()
    ids = prompts(1, 60)["input_ids"].clamp_min(3)
    cache = cache_for(model, streaming_llm(16, sinks=4))
    model(ids[:, :40], past_key_values=cache)
    for step in range(40, 60):
        found = model(ids[:, step : step + 1], past_key_values=cache).logits[:, -1]
        detach(model)
        kept = torch.cat([ids[:, :4], ids[:, step - 12 : step + 1]], 1)
        wanted = model(kept).logits[:, -1]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        cache_for(model, streaming_llm(16))  # tells the model to use our attention again
    other = cache_for(model, streaming_llm(16, sinks=4, rotate=False))
    model(ids[:, :59], past_key_values=other)
    moved = model(ids[:, 59:], past_key_values=other).logits[:, -1]
    detach(model)
    assert (moved - wanted).abs().max() > 1e-2  # with the positions of the text it is another


def test_names_say_what_is_within() -> None:
    assert adakv(base=knorm(0.5)).name == "adakv(knorm)"
    assert criticalkv(base=adakv()).name == "criticalkv(adakv)"
    assert criticalkv().wants_out and not snapkv().wants_out


def widths(recipe: Recipe, prompt: int, steps: int) -> list[int]:
    """Return the slots held after each token that is generated."""
    text, store, found = Text(prompt + steps), KVStore(1, recipe), []
    text.feed(store, 0, prompt)
    for step in range(steps):
        text.feed(store, prompt + step, prompt + step + 1)
        found.append(store.layers[0].held)
    return found


def test_triggers_fire_when_they_should() -> None:
    lazy = widths(lazy_eviction(12, lag=4), 20, 12)
    assert lazy == [13, 14, 15, 16] * 3
    full = widths(scissorhands(16, history=8, recent=2), 10, 16)
    # 10 and one more each time; at 17 slots half of 16 stay.
    assert full == [11, 12, 13, 14, 15, 16, 17, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    steady = widths(prefixkv(12, sinks=2, distance=4, mode="official"), 20, 6)
    assert steady == [13] * 6
    once = widths(prefixkv(12, sinks=2), 20, 6)
    assert once == [13, 14, 15, 16, 17, 18]
    each = widths(keyformer(12), 20, 6)
    assert each == [13] * 6


def test_layers_of_a_group_keep_the_same_windows(exact: Any) -> None:
    inputs = prompts()
    cache = cache_for(exact, windowkv(16, window=4, size=4, group=2, beta=2.0), mode="native")
    exact.generate(**inputs, past_key_values=cache, **GREEDY)
    detach(exact)
    pos = [layer.read().pos for layer in cache.store.layers]
    assert torch.equal(pos[0], pos[1]) and torch.equal(pos[2], pos[3])
    assert pos[0].shape[2] > pos[2].shape[2]


def test_compresskv_heads_and_prefixkv_heads_keep_the_same(exact: Any) -> None:
    for name in ("compresskv", "prefixkv"):
        cache = cache_for(exact, examples()[name](), mode="native")
        exact.generate(**row(prompts(), 1), past_key_values=cache, **GREEDY)
        for layer in cache.store.layers:
            pos = layer.read().pos
            assert pos.shape[1] == 1 or torch.equal(pos[:, 0], pos[:, 1])
    detach(exact)


def test_scales_hold_what_their_table_says() -> None:
    scales = ((1, 1), (2, 2), (4, 4), (8, 8))
    index = torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.9, 0.9, 0.1, 0.1]])
    table = capacities(index, 20, drafters=1, reduction=0.8)
    store = KVStore(2, scalekv(scales=scales, table=table))
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


def test_windowkv_says_what_a_window_is_worth() -> None:
    """Localization takes the mean of a window, aggregation that of its best tokens (section 2.2)."""
    whole, best = windowkv(task="localization"), windowkv(task="aggregation", best=2)
    assert whole.plan == Windows(8, 8, None) and best.plan == Windows(8, 8, 2)

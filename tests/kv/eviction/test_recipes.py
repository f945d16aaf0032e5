"""Recipes inside `generate`: nothing dropped is stock, what is dropped is as if it were hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffcache.eval.workshop.kv import oracle
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import adakv, criticalkv, h2o, knorm, snapkv, tova
from diffcache.kv.recipes.streaming import streaming_llm
from tests.kv import tiny
from tests.kv.tiny import llama, prompts, row

GREEDY = {**tiny.GREEDY, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def exact() -> Any:
    return llama().double()


@pytest.mark.parametrize(
    "recipe", [h2o(20), tova(20), streaming_llm(20, rotate=False)], ids=lambda recipe: recipe.name
)
def test_every_step_keeps_to_the_budget(exact: Any, recipe: Recipe) -> None:
    found, _, log = oracle.run(exact, recipe, prompts(1), **GREEDY)
    widths = [int((pos >= 0).sum(-1).max()) for (layer, start), pos in log.items() if start >= 48]
    assert set(widths) == {21}  # and the token itself
    assert found.sequences.shape == (1, 54)


def test_all_heads_of_tova_keep_the_same(exact: Any) -> None:
    _, cache, _ = oracle.run(exact, tova(20), prompts(1), **GREEDY)
    for layer in cache.store.layers:
        pos = layer.read().pos.expand(1, 2, -1).sort(-1).values
        assert torch.equal(pos[:, 0], pos[:, 1])


def test_snapkv_counts_its_window_and_keeps_it(exact: Any) -> None:
    _, _, log = oracle.run(exact, snapkv(12, window=8), prompts(1), **GREEDY)
    for (_, start), pos in log.items():
        if start == 48:
            assert pos.shape[-1] == 13
            kept = pos.expand(1, 2, -1)[0].tolist()
            assert all(set(range(40, 49)) <= set(head) for head in kept)


def test_h2o_adds_up_what_eager_attention_shows() -> None:
    model = llama(seed=1)
    inputs = row(prompts(), 1)
    out, cache, _ = oracle.run(model, h2o(1.0), inputs, **GREEDY)
    model.set_attn_implementation("eager")
    whole = model(out.sequences[:, :-1], output_attentions=True).attentions
    cache.store.begin(1)
    for layer, probs in zip(cache.store.layers, whole, strict=True):
        wanted = probs.unflatten(1, (2, 2)).mean(2).sum(2)
        torch.testing.assert_close(layer.stats["mass"], wanted, rtol=1e-4, atol=1e-5)


def test_h2o_is_its_greedy_algorithm(exact: Any) -> None:
    """Step by step on the full attention of a cache in which the dropped slots are hidden."""
    inputs, budget = prompts(1), 16
    inputs = row(inputs, 0)
    found, cache, log = oracle.run(exact, h2o(budget), inputs, **GREEDY)
    full = oracle.Full(exact.config)
    with oracle.masked(exact, log, cache.setup, full):
        exact.generate(**inputs, **{**GREEDY, "max_new_tokens": 1}, past_key_values=full)
    detach(exact)
    exact.set_attn_implementation("eager")
    ids = found.sequences[:, : inputs["input_ids"].shape[1]]
    first = exact(ids, output_attentions=True).attentions[0]  # layer 0 sees the same in both
    exact.set_attn_implementation("sdpa")
    mass = first.unflatten(1, (2, 2)).mean(2).sum(2)[0]
    width = ids.shape[1]
    for head in range(2):
        score = mass[head].clone()
        score[width - budget // 2 :] = torch.inf
        wanted = set(score.argsort(descending=True)[:budget].tolist()) | {width}
        assert set(log[0, width].expand(1, 2, -1)[0, head].tolist()) == wanted


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

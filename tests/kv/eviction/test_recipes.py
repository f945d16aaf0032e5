"""Recipes inside `generate`: nothing dropped is stock, what is dropped is as if it were hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.eval.workshop.kv import oracle
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import (
    adakv,
    cake,
    criticalkv,
    expected_attention,
    h2o,
    keydiff,
    knorm,
    lagkv,
    pyramidkv,
    random,
    snapkv,
    tova,
    value_norm,
)
from diffcache.kv.recipes.streaming import duo_attention, razor_attention, streaming_llm
from tests.kv import tiny
from tests.kv.tiny import llama, prompts, row, same

GREEDY = {**tiny.GREEDY, "max_new_tokens": 6}
WHOLE = ((True, True),) * 4
SOME = ((True, False), (False, False), (False, True), (False, False))

MAKERS: dict[str, Callable[[Any], Recipe]] = {
    "knorm": knorm,
    "keydiff": keydiff,
    "lagkv": lambda size: lagkv(size, lag=6),
    "value_norm": lambda size: value_norm(size, recent=2),
    "random": lambda size: random(size, seed=1, recent=2),
    "h2o": h2o,
    "h2o_mean": lambda size: h2o(size, mean=True, every=3),
    "tova": tova,
    "snapkv": lambda size: snapkv(size, window=4),
    "snapkv_max": lambda size: snapkv(size, window=4, kernel=3, pooling="max", groups="max"),
    "pyramidkv": lambda size: pyramidkv(size, window=4, beta=4),
    "cake": lambda size: cake(size, window=4),
    "adakv": lambda size: adakv(base=snapkv(size, window=4)),
    "criticalkv": lambda size: criticalkv(base=snapkv(size, window=4)),
    "critical_adakv": lambda size: criticalkv(base=adakv(base=snapkv(size, window=4))),
    "ada_h2o": lambda size: adakv(base=h2o(size)),
    "streaming": lambda size: streaming_llm(size, rotate=False),
    "duo": lambda size: duo_attention(WHOLE if size == 1.0 else SOME, size, sinks=2),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def exact() -> Any:
    return llama().double()


def stock(model: Any, inputs: Any) -> Any:
    detach(model)
    return model.generate(**inputs, **GREEDY)


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    return stock(model, prompts())


@pytest.mark.parametrize("name", MAKERS)
def test_a_full_budget_is_stock_bit_for_bit(model: Any, plain: Any, name: str) -> None:
    found, cache, _ = oracle.run(model, MAKERS[name](1.0), prompts(), **GREEDY)
    same(found, plain)
    assert all(layer.held == cache.store.seen for layer in cache.store.layers)


ROUNDING: dict[str, Callable[[Any], Recipe]] = {
    "streaming_llm": lambda size: streaming_llm(size, sinks=2),
    "razor_attention": lambda size: razor_attention(SOME, size, least=6, sinks=2),
    "expected_attention": lambda size: expected_attention(size, future=64),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_a_full_budget_is_stock_but_for_rounding(exact: Any, name: str) -> None:
    found, _, _ = oracle.run(exact, ROUNDING[name](1.0), prompts(), **GREEDY)
    same(found, stock(exact, prompts()), 1e-4)


@pytest.mark.parametrize("name", [*MAKERS, "expected_attention"])
def test_what_is_dropped_is_as_if_it_were_hidden(exact: Any, name: str) -> None:
    inputs = prompts()
    found, cache, log = oracle.run(exact, {**MAKERS, **ROUNDING}[name](0.4), inputs, **GREEDY)
    same(found, oracle.expected(exact, cache, log, inputs, **GREEDY), 1e-5)
    assert not torch.equal(found.logits[-1], stock(exact, inputs).logits[-1])


@pytest.mark.parametrize("name", [*MAKERS, *ROUNDING])
def test_a_row_alone_is_the_row_in_a_batch(exact: Any, name: str) -> None:
    recipe, inputs = {**MAKERS, **ROUNDING}[name](0.4), prompts()
    batch, _, _ = oracle.run(exact, recipe, inputs, **GREEDY)
    for number in (0, 1):
        alone, cache, _ = oracle.run(exact, recipe, row(inputs, number), **GREEDY)
        assert torch.equal(alone.sequences[0, -6:], batch.sequences[number, -6:])
        for one, two in zip(alone.logits, batch.logits, strict=True):
            torch.testing.assert_close(one[0], two[number], rtol=0, atol=1e-4)
        held = sum(int(layer.read().valid.sum()) for layer in cache.store.layers)
        whole = 4 * cache.store.seen * cache.store.layers[0].read().k.shape[1]
        assert held < 0.8 * whole  # much was dropped indeed


@pytest.mark.parametrize("name", ["h2o", "tova", "streaming"])
def test_every_step_keeps_to_the_budget(exact: Any, name: str) -> None:
    found, _, log = oracle.run(exact, MAKERS[name](20), prompts(1), **GREEDY)
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


def test_names_and_what_composes() -> None:
    assert adakv().name == "adakv" and criticalkv(base=adakv()).name == "criticalkv(adakv)"
    assert adakv(base=knorm(0.5)).name == "adakv(knorm)"
    assert criticalkv().wants_out and not snapkv().wants_out
    with pytest.raises(ValueError, match="base='idle': drops nothing"):
        adakv(base=Recipe("idle"))
    with pytest.raises(ValueError, match="base='h2o': its plan is RecentShare"):
        criticalkv(base=h2o())
    with pytest.raises(ValueError, match="both set score"):
        _ = snapkv() | knorm()

"""Caches inside `generate`: everything kept is stock, and what is dropped is as if it were hidden."""

import functools
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from diffcache.eval.workshop.kv import oracle
from diffcache.kv.budget import Budget, Uniform
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Layout, Recipe
from diffcache.kv.score.base import Score
from diffcache.kv.trigger import EveryStep
from tests.kv.tiny import GREEDY, WAYS, gemma, grouped_rounding, prompts, row, same, second_turn, stock


@dataclass(frozen=True)
class Lots(Score):
    """A number drawn for each layer, head and position, the same whatever else is held."""

    def __call__(self, seen: Observation) -> Tensor:
        pos = seen.slots.pos.long() - seen.pad.amin() * 0
        heads = seen.slots.k.shape[1]
        drawn = torch.rand(heads, 4096, generator=torch.Generator().manual_seed(seen.layer))
        return drawn[None].expand(len(pos), -1, -1).gather(2, pos.clamp_min(0).expand(-1, heads, -1))


@dataclass(frozen=True)
class Ragged(Budget):
    """Another number of slots for every layer, row and head."""

    size: int = 8

    def allot(self, scores: Any, seen: Any) -> list[Tensor]:
        found = []
        for each in seen:
            more = torch.arange(each.lengths.numel()).view_as(each.lengths) * 3 + each.layer * 2
            found.append((self.size + more).minimum(each.lengths))
        return found


RAGGED = list(product([Ragged()], ["flat", "padded"], [None, EveryStep(), EveryStep(4)]))


def lots(budget: Budget, **changes: Any) -> Recipe:
    return Recipe("lots", score=Lots(), budget=budget, plan=TopK(recent=4), **changes)


@pytest.fixture(scope="module")
def stocks(model: Any) -> Any:
    """Return what a model generates without a cache of ours, by way and whether rows are padded."""

    @functools.cache
    def made(way: str, padded: bool) -> Any:
        return stock(model, prompts() if padded else row(prompts(), 0), **GREEDY, **WAYS[way])

    return made


@pytest.mark.parametrize("mode", ["native", "stock"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "one"])
def test_keeping_all_is_stock_bit_for_bit(model: Any, stocks: Any, mode: Any, way: str, padded: bool) -> None:
    if padded and way == "assisted":
        pytest.skip("transformers assists one row at a time")
    inputs = prompts() if padded else row(prompts(), 0)
    recipe = Recipe() if mode == "stock" else lots(Uniform(1.0), trigger=EveryStep())
    cache = cache_for(model, recipe, mode=mode)
    ours = model.generate(**inputs, past_key_values=cache, **GREEDY, **WAYS[way])
    rounding = grouped_rounding() if padded and mode == "native" else 0.0
    same(ours, stocks(way, padded), rounding)


@pytest.mark.parametrize("mode", ["native", "stock"])
def test_a_second_turn_with_all_ids_is_stock(model: Any, mode: Any) -> None:
    inputs, full = prompts(), DynamicCache(config=model.config)
    detach(model)
    first = model.generate(**inputs, past_key_values=full, **GREEDY)
    turn = second_turn(inputs, first.sequences)
    theirs = model.generate(**turn, past_key_values=full, **GREEDY)
    cache = cache_for(model, Recipe(), mode=mode)
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    rounding = grouped_rounding() if mode == "native" else 0.0
    same(model.generate(**turn, past_key_values=cache, **GREEDY), theirs, rounding)


@pytest.mark.parametrize("way", ["greedy", "chunks", "beams"])
def test_sliding_layers_of_a_hybrid_stay_stock(way: str) -> None:
    model, inputs = gemma(), prompts()
    theirs = stock(model, inputs, **GREEDY, **WAYS[way])
    cache = cache_for(model, lots(Uniform(1.0)), mode="native")
    assert cache.owned == [5]
    ours = model.generate(**inputs, past_key_values=cache, **GREEDY, **WAYS[way])
    same(ours, theirs, grouped_rounding())


@pytest.mark.parametrize(
    ("budget", "layout", "trigger"),
    [(Uniform(0.4), "flat", None), (Uniform(12), "padded", EveryStep(4)), *RAGGED],
    ids=repr,
)
def test_dropping_is_hiding(exact: Any, budget: Budget, layout: Layout, trigger: Any) -> None:
    inputs = prompts()
    recipe = lots(budget, trigger=trigger, layout=layout)
    ours, cache, log = oracle.run(exact, recipe, inputs, **GREEDY)
    held = [layer.held for layer in cache.store.layers]
    assert max(held) < inputs["input_ids"].shape[1]
    same(ours, oracle.expected(exact, cache, log, inputs, **GREEDY), 1e-12)


def test_dropping_is_hiding_in_the_next_turn(exact: Any) -> None:
    inputs = prompts()
    recipe = lots(Ragged())
    cache = cache_for(exact, recipe, mode="native")
    full = oracle.Full(exact.config)
    with oracle.logged() as log:
        first = exact.generate(**inputs, past_key_values=cache, **GREEDY)
        turn = second_turn(inputs, first.sequences)
        ours = exact.generate(**turn, past_key_values=cache, **GREEDY)
    detach(exact)
    with oracle.masked(exact, log, cache.setup, full):
        exact.generate(**inputs, past_key_values=full, **GREEDY)
        same(ours, exact.generate(**turn, past_key_values=full, **GREEDY), 1e-12)
    assert cache.get_seq_length() == turn["input_ids"].shape[1] + GREEDY["max_new_tokens"] - 1


def test_the_model_is_itself_again_after_release_and_auto_says_why(model: Any) -> None:
    before = model.config._attn_implementation
    inputs = prompts()
    reference = stock(model, inputs, **GREEDY)
    assert cache_for(model, Recipe()).mode == "stock"
    cache = cache_for(model, lots(Uniform(12)))
    assert (cache.mode, cache.why) == ("native", "slots are dropped, and positions say who sees what")
    assert model.config._attn_implementation == "diffcache"
    same(model.generate(**inputs, **GREEDY), reference)  # another cache, while ours is set up
    detach(model)
    assert model.config._attn_implementation == before


def test_a_whole_prompt_is_compressed_where_it_ends_or_by_hand(exact: Any) -> None:
    inputs = {**row(prompts(), 1), "max_new_tokens": 1}
    for chunk, held in ((None, 12), (16, 48)):  # no chunk is known as the last
        cache = cache_for(exact, lots(Uniform(12)), mode="native")
        exact.generate(**inputs, past_key_values=cache, prefill_chunk_size=chunk)
        assert {layer.held for layer in cache.store.layers} == {held}
    cache.settle()
    assert {layer.held for layer in cache.store.layers} == {12} and cache.get_seq_length() == 48
    guessing = cache_for(exact, lots(Uniform(12)), mode="native")
    guessing.activate_past_recording()
    exact.generate(**inputs, past_key_values=guessing)
    guessing.crop(-2)
    assert {layer.held for layer in guessing.store.layers} == {46}
    detach(exact)


def test_a_prefill_of_ones_own_is_not_taken_for_a_whole_prompt(exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = type(exact)._prefill

    def _prefill(self: Any, ids: Tensor, config: Any, settings: Any, **more: Any) -> Any:
        settings = {**settings, "attention_mask": None}
        for part in ids.split(16, 1):
            out = read(self, part, config, settings, **more)
        return out

    monkeypatch.setattr(type(exact), "_prefill", _prefill)
    cache = cache_for(exact, lots(Uniform(12)), mode="native")
    exact.generate(**row(prompts(), 1), max_new_tokens=1, past_key_values=cache)
    assert {layer.held for layer in cache.store.layers} == {48}
    detach(exact)

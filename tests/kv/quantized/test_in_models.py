"""Recipes inside `generate`: everywhere they run, and exact codecs are stock."""

from __future__ import annotations

from typing import Any

import pytest

from diffcache.eval.workshop.kv import oracle
from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.held import ByLayer, Pair
from diffcache.kv.codec.layers import Single, Together
from diffcache.kv.hf.cache import cache_for
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import snapkv
from diffcache.kv.recipes.low_rank import minicache, xkv
from diffcache.kv.recipes.quantized import gear, kivi, mustafar, rotatekv, xquant
from diffcache.kv.view import Unread
from tests.kv.tiny import SHORT, WAYS, given, llama, prompts, same, shortly, stock

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
def model() -> Any:
    return llama()


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


@pytest.mark.parametrize("mode", ["stock", "native"])
@pytest.mark.parametrize("name", PLUMBING)
def test_exact_codecs_are_stock_bit_for_bit(model: Any, theirs: dict[str, Any], name: str, mode: Any) -> None:
    for way, settings in WAYS.items():
        cache = cache_for(model, PLUMBING[name], mode=mode)
        ours = shortly(model, cache, given(way), **settings)
        assert cache.store.layers[0].segments
        same(ours, theirs[way])


def test_setting_sinks_apart_changes_the_order_of_sums_alone(model: Any, theirs: dict[str, Any]) -> None:
    recipe = Recipe(codec=Pair(Exact(), Exact(), 8, whole=True, sinks=4))
    ours = shortly(model, cache_for(model, recipe, mode="native"), prompts())
    same(ours, theirs["greedy"], 2e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_stock_and_native_modes_say_the_same(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native mode multiplies codes as they are held, and stock mode decodes them."""
    inputs = {key: value[1:2] for key, value in prompts().items()}  # without padding
    held: list[int] = []
    whole = Unread.held
    monkeypatch.setattr(Unread, "held", lambda self: held.append(1) or whole(self))
    outs = [shortly(model, cache_for(model, RECIPES[name], mode=mode), inputs) for mode in ("stock", "native")]
    assert len(held) == (0 if name in ("kivi", "xquant", "minicache") else 20)
    same(*outs, tolerance=2e-4)

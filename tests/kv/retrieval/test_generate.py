"""Retrieval inside `generate`: reading all is stock, and reading less is run to the end."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.errors import CacheWarning
from diffcache.kv import Recipe, adakv, cache_for, detach, make_recipe, snapkv
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.summary import known
from diffcache.kv.settings import Size
from diffcache.registry import rows_of
from tests.kv.examples import TABLES
from tests.kv.tiny import IDS, SHORT, WAYS, generate, given, prompts, same

RECIPES = [name for name, row in rows_of("recipe").items() if ".retrieval:" in row.place]


def made(name: str, budget: Size) -> Recipe:
    """Return a retrieval with the settings of its row and another budget."""
    row = rows_of("recipe")[name]
    return make_recipe(name, **{**TABLES.get(name, {}), **row.skips, "budget": budget})


@pytest.fixture(scope="module")
def stock(model: Any) -> dict[str, Any]:
    """Return the outputs of the model without a cache of ours, by way."""
    detach(model)
    return {way: model.generate(**given(way), **SHORT, **settings) for way, settings in WAYS.items()}


@pytest.mark.parametrize("way", ["beams", "assisted"])
@pytest.mark.parametrize("name", RECIPES)
def test_reading_less_reads_less(model: Any, stock: Any, name: str, way: str, reads: dict[KVLayer, Tensor]) -> None:
    budget = 44 if name == "shadowkv" else 12  # its last four chunks are exact
    cache = cache_for(model, made(name, budget))
    found = model.generate(**given(way), past_key_values=cache, **SHORT, **WAYS[way])
    detach(model)
    assert found.sequences.shape == stock[way].sequences.shape
    store = cache.store
    few = {"quest": [1, 2, 3], "tidal_decode": [2], "rekv": []}.get(name, [0, 1, 2, 3])
    # Drafted tokens choose one by one and read what any of them chose.
    most = budget if way != "assisted" else 4 * budget
    assert all(float(reads[store.layers[n]].float().mean()) <= most for n in few), reads
    assert all(layer.held == layer.seen for layer in store.layers)
    inside = [tensor for layer in store.layers for tensor in layer.tensors()]
    assert store.nbytes >= sum({t.untyped_storage().data_ptr(): t.nbytes for t in inside}.values())


def test_layers_that_follow_read_the_positions_of_the_one_that_chose(model: Any, reads: dict[KVLayer, Tensor]) -> None:
    cache = cache_for(model, made("tidal_decode", 12))
    model.generate(**prompts(), past_key_values=cache, **SHORT)
    detach(model)
    chose, follows = cache.store.layers[1:3]
    assert torch.equal(known(chose).state["chosen"], known(follows).state["chosen"])
    assert int(reads[chose].amax()) > 12 >= int(reads[follows].amax())
    cache = cache_for(model, made("tidal_decode", 0.01))  # room for none, in rows without gaps
    with pytest.warns(CacheWarning, match="nothing else is"):
        model.generate(IDS, past_key_values=cache, **SHORT)
    detach(model)
    assert [int(reads[layer].amax()) for layer in cache.store.layers[:3]] == [27, 27, 4]


CODEC = Recipe("bits", codec=Pair(GroupQuant(8, "tokens", 8), GroupQuant(8), block=8, slide=True))


@pytest.mark.parametrize(
    ("name", "other"), [("quest", snapkv(24)), ("tidal_decode", adakv(0.6)), ("sentence_kv", CODEC), ("quest", CODEC)]
)
def test_retrieval_composes_with_dropping_and_coding(model: Any, name: str, other: Recipe, reads: Any) -> None:
    inputs = prompts()
    caches = [cache_for(model, x, mode="native") for x in (other, other | made(name, 1.0))]
    alone, both = (model.generate(**inputs, past_key_values=each, **SHORT) for each in caches)
    same(alone, both, 1e-5)
    cache = cache_for(model, other | made(name, 10))
    model.generate(**inputs, past_key_values=cache, **SHORT)
    detach(model)
    assert float(reads[cache.store.layers[2]].float().mean()) <= 10


def test_a_block_that_is_all_padding_is_coded(model: Any, stock: Any) -> None:
    alone = {name: value[:1] for name, value in given("greedy").items()}  # 17 tokens of padding
    settings = {**rows_of("recipe")["shadowkv"].off, "block": 8}
    out = generate(model, cache_for(model, "shadowkv", **settings), alone)
    assert torch.equal(out.sequences, stock["greedy"].sequences[:1])

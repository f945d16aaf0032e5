"""The adapter where versions of transformers differ."""

import warnings
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from diffcache import kv
from diffcache.errors import AttachError
from diffcache.foreign import cache_name, with_cache
from diffcache.kv.hf import versions
from diffcache.kv.recipe import Recipe
from tests.kv.tiny import prompts


def read(model: Any, recipe: Recipe) -> Any:
    cache = kv.cache_for(model, recipe)
    model(input_ids=prompts(1)["input_ids"][:, 17:], past_key_values=cache)
    return cache


def test_a_positive_number_is_a_length_where_transformers_means_one(model: Any, monkeypatch) -> None:
    monkeypatch.setattr(versions, "_CROPS_TO_LENGTH", False)
    cache = read(model, Recipe())
    with pytest.raises(ValueError, match="tokens_to_remove=29: must be negative"):
        cache.crop(29)
    monkeypatch.setattr(versions, "_CROPS_TO_LENGTH", True)
    for given, left in ((29, 29), (40, 29), (-1, 28), (0, 28), (torch.tensor(-2), 26)):
        cache.crop(given)
        assert cache.get_seq_length() == left
        assert all(type(layer.seen) is int for layer in cache.store.layers)


def test_caches_are_given_by_the_name_that_a_model_knows(model: Any) -> None:
    def older(input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...
    def newer(input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...

    assert cache_name(older) == "past_key_values" and cache_name(newer) == "cache"
    given = prompts(1)["input_ids"][:, 17:]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of the other name
        with kv.caching(model, "streaming_llm", budget=16) as used:
            wanted = model.generate(given, max_new_tokens=3, do_sample=False)
            model(input_ids=given)
        assert used.count == 2
        cache = kv.cache_for(model, "streaming_llm", budget=16)
        model(input_ids=given[:, :9], **with_cache(model, cache))
    for name in ("past_key_values", cache_name(model.forward)):  # both are served by 5.24
        with kv.caching(model, "h2o", budget=16) as used:
            cache = kv.cache_for(model, "streaming_llm", budget=16)
            out = model.generate(given, max_new_tokens=3, do_sample=False, **{str(name): cache})
            assert torch.equal(out, wanted) and used.count == 0
            model(input_ids=given[:, :1], **{str(name): cache})
            assert used.count == 0 and cache.get_seq_length() == given.shape[1] + 3


def test_guesses_that_nobody_announced_are_refused_where_slots_are_dropped(model: Any, monkeypatch) -> None:
    monkeypatch.setattr(versions, "_CROPS_TO_LENGTH", True)
    cache = read(model, kv.snapkv(8, window=4))
    with pytest.raises(AttachError, match=r"call cache.activate_past_recording\(\) before gen"):
        cache.crop(30)
    cache.reset()
    cache.activate_past_recording()
    model(input_ids=prompts(1)["input_ids"][:, 17:], past_key_values=cache)
    cache.crop(30)
    assert cache.get_seq_length() == 30
    kv.detach(model)


def test_masks_are_for_positions_or_their_number(model: Any) -> None:
    cache = read(model, Recipe())
    layer = cache.layers[0]
    assert layer.get_mask_sizes(torch.arange(5)) == layer.get_mask_sizes(5) == (36, 0)
    assert layer.get_max_cache_shape() == layer.get_max_length() == -1
    static = kv.static_cache_for(model, 8).layers[0]
    static.lazy_initialization(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    assert static.get_mask_sizes(torch.arange(5)) == static.get_mask_sizes(5)
    assert static.get_max_cache_shape() == -1


def test_layers_that_share_are_dummies_or_missing(model: Any) -> None:
    class DummyLayer:
        pass

    layers = DynamicCache(config=model.config).layers
    assert not versions.has_shared_layers(model.config, layers)
    assert versions.has_shared_layers(model.config, layers[:-1])
    assert versions.has_shared_layers(model.config, [*layers[:-1], DummyLayer()])

"""Inputs of layers in place of keys and values."""

import gc
from typing import Any

import pytest
import torch

from diffcache.kv.hf.cache import detach
from diffcache.kv.hf.layer_inputs import remat_cache_for
from tests.kv.tiny import WAYS, given, llama, prompts, same, shortly, stock


@pytest.mark.parametrize(("way", "layers"), [(way, 1 + number % 2) for number, way in enumerate(WAYS)])
def test_exact_inputs_are_stock(way: str, layers: int) -> None:
    model = llama().double()
    inputs = given(way)
    want = stock(model, inputs, **WAYS[way])
    cache = remat_cache_for(model, None, residual=8, layers=layers)
    ours = shortly(model, cache, inputs, **WAYS[way])
    same(ours, want, tolerance=1e-6)  # logits are rounded to float32
    assert cache.store.layers[0].read().k.shape[1:] == (1, cache.store.seen, 64)
    detach(model)


def test_keys_and_values_are_projections_of_what_the_codes_say(model: Any) -> None:
    cache = remat_cache_for(model, 4, group=16, residual=8)
    shortly(model, cache, prompts())
    layer = cache.store.layers[2]
    x = layer.segments[0].read().k[:, 0]
    (view,) = cache.store.recipe.retrieve.views(None, layer, [])  # type: ignore[union-attr, arg-type]
    module = model.model.layers[2].self_attn
    k, v = (p(x).unflatten(-1, (2, 16)).transpose(1, 2) for p in (module.k_proj, module.v_proj))
    width = x.shape[1]
    assert torch.equal(view.slots.v[:, :, :width], v)
    turned = layer.rotary.rotate(k, view.slots.rpos[..., :width])  # type: ignore[union-attr]
    assert torch.equal(view.slots.k[:, :, :width], turned)
    assert layer.tail.length < 8 + 1
    detach(model)


def test_hooks_go_with_the_cache(model: Any) -> None:
    hooks = model.model.layers[0].self_attn.k_proj._forward_pre_hooks
    gc.collect()  # caches of other tests
    before = len(hooks)
    cache = remat_cache_for(model, 4)
    assert len(hooks) == before + 1
    del cache
    gc.collect()
    assert len(hooks) == before
    detach(model)

"""Bases and heads that are fitted to a model, and inputs of layers in place of keys and values."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from diffcache.kv import cache_for, cskv, detach, kv_heads, xquant_latent
from diffcache.kv.hf.layer_inputs import remat_cache_for
from diffcache.kv.learn import cskv as learn
from diffcache.kv.learn import kv_heads as heads
from diffcache.kv.learn.latents import latents
from tests.kv.tiny import WAYS, generate, given, llama, prompts, same, stock


def noted(model: Any) -> tuple[list[Any], list[list[torch.Tensor]]]:
    modules = [layer.self_attn for layer in model.model.layers]
    with learn.inputs_of([module.k_proj for module in modules]) as found, torch.no_grad():
        model(**prompts(2, 64, seed=5))
    return [(module.k_proj, module.v_proj) for module in modules], found


def test_training_lowers_the_error_of_every_layer_and_goes_on_where_it_stopped(model: Any) -> None:
    detach(model)
    projections, inputs = noted(model)
    assert [x.shape for x in inputs[0]] == [(128, 64)]
    reports: dict[int, list[float]] = {}

    def report(number: int, bases: learn.Bases, errors: list[float]) -> None:
        reports[number] = errors

    how = learn.BasisFit(12, 16, steps=60, rate=3e-3, batch=64)
    bases = learn.fit(projections, inputs, how, report=report)
    for key_before, key_after, value_before, value_after in reports.values():
        assert key_after < 0.98 * key_before and value_after < 0.98 * value_before
    assert bases[0].key_down.shape == (32, 12) and bases[0].value_up.shape == (16, 32)
    again = learn.fit(projections, inputs, how, done={0: bases[0]}, report=report)
    assert again[0] is bases[0]
    assert torch.equal(again[1].key_down, bases[1].key_down)
    out = generate(model, cache_for(model, cskv(bases, recent=8, bits=8)), prompts())
    assert torch.stack(out.logits).isfinite().all()


def test_full_bases_are_stock(model: Any) -> None:
    detach(model)
    projections, inputs = noted(model)
    want = stock(model, prompts())
    full = learn.fit(projections, inputs, learn.BasisFit(32, steps=0))
    same(generate(model, cache_for(model, cskv(full, recent=4)), prompts()), want, 2e-3)
    all_heads = heads.fit(projections, inputs, 2, 2)
    same(generate(model, cache_for(model, kv_heads(all_heads)), prompts()), want, 2e-3)


def test_latents_lose_nothing_before_they_are_quantized(model: Any) -> None:
    detach(model)
    projections, inputs = noted(model)
    bases = latents(projections)
    x = torch.cat(inputs[1])
    for module, down in zip(projections[1], (bases[1].key_down, bases[1].value_down), strict=True):
        left = torch.linalg.svd(module.weight.detach(), full_matrices=False).Vh @ x.T
        found = (learn.outputs_of(module, x) @ down).T
        assert torch.allclose(found.abs(), left.abs(), atol=1e-3)  # up to the sign of each vector
    want = stock(model, prompts())
    exact = cskv(bases, recent=0)
    same(generate(model, cache_for(model, exact), prompts()), want, 2e-3)
    eight = xquant_latent(bases, 8, group=8, residual=8)
    ours = generate(model, cache_for(model, eight), prompts())
    assert torch.equal(ours.sequences, want.sequences)


def test_a_group_keeps_the_best_of_what_its_heads_hold() -> None:
    outputs = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)).double()
    down, up = heads.group_bases(outputs, 4, 2)
    assert down.shape == (12, 6)
    for part in range(2):
        x = outputs[:, 6 * part : 6 * part + 6]
        error = (x - outputs @ down @ up[:, 6 * part : 6 * part + 6]).square().sum()
        assert torch.isclose(error, torch.linalg.svdvals(x)[3:].square().sum())


@pytest.mark.parametrize(("way", "layers"), [(way, 1 + number % 2) for number, way in enumerate(WAYS)])
def test_exact_inputs_are_stock(way: str, layers: int) -> None:
    model = llama().double()
    inputs = given(way)
    want = stock(model, inputs, **WAYS[way])
    cache = remat_cache_for(model, None, residual=8, layers=layers)
    ours = generate(model, cache, inputs, **WAYS[way])
    same(ours, want, tolerance=1e-6)  # logits are rounded to float32
    assert cache.store.layers[0].read().k.shape[1:] == (1, cache.store.seen, 64)
    detach(model)


def test_inputs_are_those_of_the_thread_and_autocast_is_no_change_of_keys(model: Any) -> None:
    want, calls = stock(model, prompts()), []

    def meet(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 3:  # another thread runs the model between two projections of this one
            with ThreadPoolExecutor(1) as pool:
                pool.submit(generate, model, other, prompts(seed=5)).result()

    cache, other = remat_cache_for(model, None), remat_cache_for(model, None)
    handle = model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(meet)
    same(generate(model, cache, prompts()), want, tolerance=1e-5)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        same(generate(model, remat_cache_for(model, None), prompts()), generate(model, None, prompts()), 1e-5)
    detach(model)


def test_keys_and_values_are_projections_of_what_the_codes_say(model: Any) -> None:
    cache = remat_cache_for(model, 4, group=16, residual=8)
    generate(model, cache, prompts())
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

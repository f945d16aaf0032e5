"""Traps that break other caches: copies, pickles, offload hooks, shared parts, odd schedulers."""

from __future__ import annotations

import copy
import filecmp
import io
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import diffcache
from diffcache import AttachError, CacheWarning, Interval
from diffcache.anchor import owner_of
from diffcache.targets import handle_of
from tests.internals import marks
from tests.zoo.catalog import cases
from tests.zoo_runs import EVERY, PIPES, flux, run

CASES = cases()

pytestmark = pytest.mark.usefixtures("quiet")


# 1, 5: copies and pickles --------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["stack", "block", "module", "model"])
def test_a_deep_copy_of_a_model_runs_its_own_weights_and_says_that_it_is_uncached(site: str):
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), Interval(every=3, site=site))
    model(**case.kwargs(model, 0))
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.mul_(1.1)
    changed = case.build(0)
    for parameter in changed.parameters():
        parameter.mul_(1.1)
    expected = changed(**case.kwargs(changed, 0)).sample
    with pytest.warns(CacheWarning, match="a copy of a wrapped one and runs uncached; wrap it too"):
        out = twin(**case.kwargs(twin, 0)).sample
    assert torch.equal(out, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        for step in range(4):
            made = case.kwargs(twin, 0, step)
            assert torch.equal(twin(**made).sample, changed(**case.kwargs(changed, 0, step)).sample)
    assert len(handle_of(model).last.calls) == 1  # the original heard nothing
    with pytest.raises(AttachError, match="is not wrapped"):
        handle_of(twin)
    diffcache.wrap(twin, EVERY)
    twin(**case.kwargs(twin, 0))


def test_a_shallow_copy_leaves_the_original_cached():
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), EVERY)
    twin = copy.copy(model)
    exact = case.build(0)
    for step in range(4):
        model(**case.kwargs(model, 0, step))
        out = twin(**case.kwargs(twin, 0, step)).sample
        assert torch.equal(out, exact(**case.kwargs(exact, 0, step)).sample)
    assert marks(model) == "CssC"


@pytest.mark.parametrize("site", ["stack", "module"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickled_model_comes_back_plain(how: str, site: str):
    case = CASES["FluxTransformer2DModel"]
    model = case.build(0)
    expected = model(**case.kwargs(model, 0)).sample
    diffcache.wrap(model, Interval(every=3, site=site))
    model(**case.kwargs(model, 0))
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert type(twin) is type(model)
    assert all(type(module.__dict__["_modules"]) is dict for module in twin.modules())
    assert all(type(m) is not type(model.transformer_blocks) for m in twin.modules() if site == "stack")
    assert torch.equal(twin(**case.kwargs(twin, 0)).sample, expected)
    assert handle_of(model).last.calls[-1].index == 0


def test_a_copy_hears_no_contexts_until_it_is_wrapped_itself():
    name = "WanPipeline"
    pipe = PIPES[name].build(0)
    plain = run(pipe, name)
    expected = run(diffcache.wrap(pipe, EVERY), name)
    twin = copy.deepcopy(pipe)
    with pytest.warns(CacheWarning, match="runs uncached"):
        assert torch.equal(run(twin, name), plain)
    assert torch.equal(run(pipe, name), expected)
    diffcache.wrap(twin, EVERY)
    assert torch.equal(run(twin, name), expected)
    assert {call.branch for call in handle_of(twin).last.calls} == {"cond", "uncond"}
    assert list(twin.transformer._diffusers_hook._hook_order) == ["diffcache"]


def test_a_tapped_scheduler_pickles_and_copies_as_its_class():
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = diffcache.wrap(flux(), EVERY)
    for twin in (pickle.loads(pickle.dumps(pipe.scheduler)), copy.deepcopy(pipe.scheduler)):
        assert type(twin) is FlowMatchEulerDiscreteScheduler
        assert owner_of(twin) is None
        assert twin.config == pipe.scheduler.config
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler


def test_a_state_dict_knows_nothing_of_the_cache():
    model = CASES["FluxTransformer2DModel"].build(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    diffcache.wrap(model, Interval(every=3, site="module"))
    after = model.state_dict()
    assert list(before) == list(after)
    model.load_state_dict(before)
    model.to(torch.bfloat16).to(torch.float32)
    assert [name for name, _ in model.named_parameters()] == list(before)


# 1: accelerate's hooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["hook first", "cache first"])
def test_accelerate_hooks_come_and_go(order: str):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    pipe = flux()
    plain = run(pipe)
    cached = run(diffcache.wrap(pipe, EVERY))
    diffcache.unwrap(pipe)
    if order == "hook first":
        add_hook_to_module(pipe.transformer, ModelHook())
        diffcache.wrap(pipe, EVERY)
    else:
        diffcache.wrap(pipe, EVERY)
        add_hook_to_module(pipe.transformer, ModelHook())
    assert torch.equal(run(pipe), cached) and marks(pipe) == "CssCss"
    remove_hook_from_module(pipe.transformer, recurse=True)
    assert torch.equal(run(pipe), cached) and marks(pipe) == "CssCss"
    diffcache.unwrap(pipe)
    assert torch.equal(run(pipe), plain)


# 2: pipelines that share parts ----------------------------------------------------------------------


def test_from_pipe_shares_the_wrapped_denoiser():
    from diffusers import FluxImg2ImgPipeline

    source = PIPES["FluxImg2ImgPipeline"].build(0)
    name = "FluxImg2ImgPipeline"
    expected = run(diffcache.wrap(source, EVERY), name, strength=1.0)
    diffcache.unwrap(source)
    pipe = PIPES["FluxPipeline"].build(0)
    diffcache.wrap(pipe, EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        other = FluxImg2ImgPipeline.from_pipe(pipe, vae=source.vae)
    other.set_progress_bar_config(disable=True)
    assert other.transformer is pipe.transformer
    out = run(other, name, strength=1.0)
    assert marks(other) == "CssCss"
    assert torch.equal(out, expected)
    assert torch.equal(run(other, name, strength=1.0), expected)


# 5: inference mode -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["stack", "block", "module", "model"])
def test_inference_mode(site: str):
    case = CASES["FluxTransformer2DModel"]
    model = diffcache.wrap(case.build(0), Interval(every=2, site=site))
    expected = [model(**case.kwargs(model, 0, s)).sample for s in range(4)]
    diffcache.reset(model)
    with torch.inference_mode():
        outs = [model(**case.kwargs(model, 0, s)).sample for s in range(4)]
    assert marks(model) == "CsCs"
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    diffcache.reset(model)  # and back: no inference tensor is left in the way
    with torch.enable_grad():
        model(**case.kwargs(model, 0, 0))
        out = model(**case.kwargs(model, 0, 1)).sample
        if site != "model":  # whose estimate is all there is
            out.sum().backward()


# saving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["stack", "module"])
def test_saving_while_wrapped_writes_the_same_files(tmp_path: Path, site: str):
    pipe = flux()
    pipe.save_pretrained(tmp_path / "plain")
    diffcache.wrap(pipe, Interval(every=3, site=site))
    run(pipe)
    pipe.save_pretrained(tmp_path / "wrapped")
    names = sorted(str(f.relative_to(tmp_path / "plain")) for f in (tmp_path / "plain").rglob("*") if f.is_file())
    others = sorted(str(f.relative_to(tmp_path / "wrapped")) for f in (tmp_path / "wrapped").rglob("*") if f.is_file())
    assert names == others and any(name.endswith(".safetensors") for name in names)
    same, different, _ = filecmp.cmpfiles(tmp_path / "plain", tmp_path / "wrapped", names, shallow=False)
    assert (sorted(same), different) == (names, [])
    assert isinstance(pipe.transformer, nn.Module) and os.listdir(tmp_path)

"""Configurations and calibrations of diffusers and cache-dit."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from torch import nn

import diffcache
from diffcache import Combine, FirstBlock, Held, Taylor
from diffcache.catalog import make_method
from diffcache.features.dbcache import DBCache
from diffcache.features.magcache import MagCache
from diffcache.features.parts.when import steps_of
from diffcache.features.peer_configs import DiffusersInterval, method_of_config
from diffcache.features.teacache import TeaCache
from tests.internals import noting
from tests.zoo.pipes import pipes

STEPS = 14
RATIOS = [1.0, 1.1, 1.04, 0.98, 1.01, 0.97, 1.02, 0.99, 1.005, 0.98, 1.01, 0.95, 0.93, 0.9]


@contextmanager
def theirs(pipe: Any, config: Any) -> Iterator[None]:
    pipe.transformer.enable_cache(config)
    try:
        yield
    finally:
        pipe.transformer.disable_cache()


@contextmanager
def ours(pipe: Any, config: Any) -> Iterator[None]:
    with diffcache.wrapped(pipe, config):
        yield


def drawn(way: Any, name: str, config: Any, inside: str) -> tuple[list[list[bool]], torch.Tensor]:
    """Return which calls ran a module, one list a branch, and what a pipeline made."""
    case = pipes()[name]
    pipe = case.build(0)
    calls: list[bool] = []
    module: nn.Module = pipe.transformer.get_submodule(inside)
    with way(pipe, config):
        opened = type(pipe.transformer)
        hooks = [module.register_forward_hook(lambda *_: calls.__setitem__(-1, True))]
        hooks.append(pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(False)))
        made = pipe(**case.call(pipe, 0, STEPS))[0]
        assert isinstance(pipe.transformer, opened)
        for hook in hooks:
            hook.remove()
    return [calls[branch :: case.branches] for branch in range(case.branches)], made


CONFIGS = [
    # name of the pipeline, configuration, a module inside what is skipped
    ("FluxPipeline", FirstBlockCacheConfig(threshold=0.4), "transformer_blocks.1.attn.to_q"),
    ("WanPipeline", FirstBlockCacheConfig(threshold=0.4), "blocks.1.attn1.to_q"),
    ("FluxPipeline", MagCacheConfig(mag_ratios=RATIOS, num_inference_steps=STEPS, threshold=0.12,
                                    max_skip_steps=2), "transformer_blocks.1.attn.to_q"),
    ("WanPipeline", MagCacheConfig(mag_ratios=RATIOS[::2], num_inference_steps=STEPS,
                                   retention_ratio=0.1), "blocks.1.attn1.to_q"),
    ("FluxPipeline", TaylorSeerCacheConfig(cache_interval=3, max_order=2,
                                           taylor_factors_dtype=torch.float32),
     "transformer_blocks.1.attn.to_q"),
    ("QwenImagePipeline", TaylorSeerCacheConfig(cache_interval=4, disable_cache_before_step=2,
                                                disable_cache_after_step=11),
     "transformer_blocks.1.attn.to_q"),
    ("FluxPipeline", TaylorSeerCacheConfig(cache_interval=5, use_lite_mode=True, max_order=1,
                                           taylor_factors_dtype=torch.float32),
     "transformer_blocks.1.attn.to_q"),
]  # fmt: skip
IDS = [f"{type(config).__name__}-{name}-{n}" for n, (name, config, _) in enumerate(CONFIGS)]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("name", "config", "inside"), CONFIGS, ids=IDS)
def test_the_same_steps_are_computed_as_by_diffusers(name: str, config: Any, inside: str, agrees: Any) -> None:
    expected, image = drawn(theirs, name, copy.deepcopy(config), inside)
    found, made = drawn(ours, name, config, inside)
    assert 0 < sum(expected[0]) < STEPS
    method = {"First": "first-block", "MagCa": "magcache", "Taylo": "taylorseer"}
    method = method[type(config).__name__[:5]]
    agrees(method, "diffusers, run", [made], [image], 1e-5, (found, expected))


def dit_config(**changes: Any) -> Any:
    """Return a configuration with the fields of cache-dit 1.5.3's, which need not be installed."""
    limits = dict(max_accumulated_residual_diff_threshold=None, max_warmup_steps=8, warmup_interval=1)
    limits |= dict(max_cached_steps=-1, max_continuous_cached_steps=-1, residual_diff_threshold=0.08)
    cfg = dict(enable_separate_cfg=None, cfg_compute_first=False, cfg_diff_compute_separate=True)
    steps = dict(num_inference_steps=None, steps_computation_mask=None, steps_computation_policy="dynamic")
    steps |= dict(force_refresh_step_hint=None, force_refresh_step_policy="once")
    fields = dict(cache_type="DBCache", Fn_compute_blocks=8, Bn_compute_blocks=0) | limits | cfg | steps
    made = dataclasses.make_dataclass("DBCacheConfig", [(n, Any, field(default=d)) for n, d in fields.items()])
    made.__module__ = "cache_dit.caching.cache_contexts.cache_config"
    return made(**changes)


def test_dbcache_of_cache_dit_is_dbcache() -> None:
    assert method_of_config(dit_config()) == DBCache(0.08, lead=8, warmup=8, by_branch=True)
    config = dit_config(
        Fn_compute_blocks=1,
        Bn_compute_blocks=2,
        residual_diff_threshold=torch.tensor(0.25),
        max_warmup_steps=0,
        max_cached_steps=6,
        max_continuous_cached_steps=2,
        cfg_diff_compute_separate=False,
        enable_separate_cfg=True,
        num_inference_steps=28,
    )
    assert make_method(config) == DBCache(0.25, lead=1, tail=2, warmup=1, longest=2, skips=6)


@pytest.mark.usefixtures("quiet")
def test_the_same_steps_are_computed_as_by_cache_dit(agrees: Any) -> None:
    cache_dit = pytest.importorskip("cache_dit")

    def config() -> Any:
        return cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            residual_diff_threshold=0.4,
            max_warmup_steps=3,
            max_continuous_cached_steps=2,
            enable_separate_cfg=True,
        )

    @contextmanager
    def cached(pipe: Any, config: Any) -> Iterator[None]:
        cache_dit.enable_cache(pipe, cache_config=config)
        try:
            yield
        finally:
            cache_dit.disable_cache(pipe)

    expected, image = drawn(cached, "WanPipeline", config(), "blocks.1.attn1.to_q")
    found, made = drawn(ours, "WanPipeline", config(), "blocks.1.attn1.to_q")
    assert 0 < sum(expected[0]) < STEPS
    agrees("dbcache", "cache-dit, run", [made], [image], 1e-5, (found, expected))


@dataclass
class Newer(FirstBlockCacheConfig):
    """A configuration of a later version, with one field more."""

    warmup: int = 2


def test_configurations_are_methods_for_every_verb() -> None:
    assert make_method(FirstBlockCacheConfig(0.1)) == FirstBlock(0.1, by_branch=True)
    assert method_of_config(Newer(0.1)) == FirstBlock(0.1, by_branch=True)
    held = make_method(TaylorSeerCacheConfig())
    assert held == Held(Combine(DiffusersInterval(5, 3), Taylor(1), "attention"), "bf16")
    assert eval(repr(held), {**vars(diffcache), "DiffusersInterval": DiffusersInterval}) == held
    assert steps_of(DiffusersInterval(5, 3, after=11), 13) == (0, 1, 2, 4, 9, 11, 12)
    pipe = pipes()["FluxPipeline"].build(0)
    assert diffcache.expected_bytes(pipe, TaylorSeerCacheConfig())["transformer"] > 0


PEER_CALIBRATION_STEPS = 6

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def made():
    case = pipes()["FluxPipeline"]
    pipe = case.build(0)
    prompts = [case.prompt(pipe, seed, PEER_CALIBRATION_STEPS) for seed in range(2)]
    return case, pipe, [prompt | {"latents": latents_of(case, pipe, seed)} for seed, prompt in enumerate(prompts)]


def latents_of(case, pipe, seed):
    """The noise a call starts from, so that a run can be drawn again."""
    with noting(pipe.transformer) as seen, torch.no_grad():
        pipe(**case.call(pipe, seed, 1))
    return seen[0]["hidden_states"].clone()


def watched(pipe, prompt):
    """Of every step: the input of the first attention, and what each list takes and returns."""
    model, seen = pipe.transformer, []
    lists = [list(model.transformer_blocks), list(model.single_transformer_blocks)]
    attention = lists[0][0].attn

    def arrive(module, args, kwargs):
        seen[-1]["probe"] = kwargs["hidden_states"].clone()

    def take(module, args, kwargs, key):
        if key == 0:
            seen.append({})
        seen[-1]["in", key] = [kwargs["encoder_hidden_states"], kwargs["hidden_states"]]

    def leave(module, args, kwargs, out, key):
        seen[-1]["out", key] = [out[0].clone(), out[1].clone()]

    hooks = [attention.register_forward_pre_hook(arrive, with_kwargs=True)]
    for key, blocks in enumerate(lists):
        hooks.append(
            blocks[0].register_forward_pre_hook(
                lambda m, a, k, key=key: take(m, a, k, key), with_kwargs=True, prepend=True
            )
        )
        hooks.append(
            blocks[-1].register_forward_hook(lambda m, a, k, o, key=key: leave(m, a, k, o, key), with_kwargs=True)
        )
    pipe(**prompt)
    for hook in hooks:
        hook.remove()
    return seen


def test_tables_are_what_hooks_on_uncached_runs_see(made):
    _, pipe, prompts = made
    runs = [watched(pipe, prompt) for prompt in prompts]
    points, ratios = [], []
    for run in runs:
        for before, now in pairwise(run):
            moved = (now["probe"] - before["probe"]).abs().sum() / before["probe"].abs().sum()
            error = sum((b - a).abs().sum() for a, b in zip(before["out", 1], now["out", 1], strict=True))
            scale = sum(a.abs().sum() for a in before["out", 1])
            points.append((float(moved), float(error / scale)))
        added = [torch.cat([sum(s["out", k][n] - s["in", k][n] for k in (0, 1)) for n in (0, 1)], 1) for s in run]
        norms = torch.stack([value.norm(dim=-1) for value in added])
        ratios.append((norms[1:] / norms[:-1]).flatten(1).mean(1))
    tea, mag = diffcache.calibrate(pipe, [TeaCache(), MagCache()], prompts, steps=PEER_CALIBRATION_STEPS, batch_size=1)
    assert len(tea.tables["points"]) == 2 * (PEER_CALIBRATION_STEPS - 1)
    assert torch.allclose(tea.tables["points"], torch.tensor(points, dtype=torch.float64), rtol=1e-3, atol=1e-6)
    expected = torch.stack(ratios).mean(0).double()
    assert torch.allclose(mag.tables["ratios"][1:], expected, rtol=1e-3)
    assert mag.tables["ratios"][0] == 1

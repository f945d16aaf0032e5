"""FLOPs as they are counted, against closed forms and what ran under a cache."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import diffcache
from diffcache import AttachError, CacheWarning, Combine, Every, FirstBlock, TaylorSeer
from diffcache.attach.flops import _refuses_modes
from diffcache.eval.cost import flops
from diffcache.eval.runs.draw import summary
from diffcache.eval.runs.folder import evaluations
from diffcache.features.base import Probe
from diffcache.features.parts.when import Gate
from diffcache.pipelines.small import flux
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

ALWAYS = float("inf")
MODULES = Combine(Every(3), site="module")
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which torch leaves out


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def test_a_real_call_counts_what_the_layers_say(pipe, call, flux_form):
    config = pipe.transformer.config
    counted = flops.count(pipe, call(2, batch=3))
    tokens = (64 // pipe.vae_scale_factor // 2) ** 2
    expected, _, _ = flux_form(config, tokens, flux.TEXT_TOKENS, batch=3)
    assert counted.calls == (("transformer", expected),) * 2
    assert (counted.steps, counted.per_call, counted.total) == (2, expected, 2 * expected)
    assert flops.count(pipe, call(3, batch=3)).per_step == expected
    assert "forward" not in vars(pipe.transformer) and "step" not in vars(pipe.scheduler)


@pytest.mark.parametrize("name", ["WanPipeline-two", "WanPipeline"])
def test_a_step_is_all_branches_of_every_denoiser(name):
    case = next((case for key, case in pipes().items() if key.startswith(name)), None)
    assert case is not None
    made = case.build(0)
    counted = flops.count(made, case.call(made, 0, 4))
    assert counted.steps == 4 and len(counted.calls) == 4 * case.branches
    assert {denoiser for denoiser, _ in counted.calls} == set(case.denoisers)
    assert counted.per_step == case.branches * counted.per_call


@pytest.mark.parametrize(
    "method",
    [
        TaylorSeer(2, warmup=1, site="stack"),
        TaylorSeer(2, warmup=1, site="attention"),
        TaylorSeer(2, warmup=1, site="module"),
        FirstBlock(1e9),
    ],
)
def test_flops_of_a_cached_run_are_those_that_ran(pipe, method, call):
    full = flops.count(pipe, call(2)).per_step
    with diffcache.wrapped(pipe, method):
        pipe(**call(2))  # learns the wiring, which runs blocks once more
        with flops.counting({"whole": pipe.transformer}) as tally:
            pipe(**call(6))
        report, line = diffcache.report(pipe), {"ids": [0], "cache": summary(pipe)}
    assert report.skipped
    assert 6 * full - report.flops_saved == pytest.approx(tally.total, rel=1e-9)
    assert evaluations([line], 6, full) == pytest.approx(tally.total / full, rel=1e-9)


def gated(probe: Probe) -> Combine:
    """Blocks that always run at both ends, and a gate that skips all it may after its look."""
    return Combine(Gate(ALWAYS, of=probe), lead=1, tail=1)


@contextmanager
def torch_counts(models: list[nn.Module]) -> Iterator[list[float]]:
    """Collect what torch's own counter says of every call of the models."""
    counts: list[float] = []

    def counting(forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = FlopCounterMode(display=False, custom_mapping={_ATTENTION: _attention})
            with mode:
                out = forward(*args, **kwargs)
            counts.append(mode.get_total_flops())
            return out

        return call

    for model in models:
        model.forward = counting(model.forward)
    try:
        yield counts
    finally:
        for model in models:
            del model.forward


# Pipelines that a gate's look, or the site `stack` of the gate, does not serve -> what says so.
BLIND = {
    "DDIMPipeline": "down_blocks.0 has no attention module",
    "StableCascadeDecoderPipeline": "calls none of the attentions that were found",
    "StableDiffusionXLPipeline": "down_blocks.0 has no attention module",
}
NO_STACK = {"WanAnimatePipeline": "changes the output by .* use site='block' or site='model'"}
# Those that make other calls than one step shows, or whose scheduler cannot take one step.
TWO = {"SkyReelsV2DiffusionForcingPipeline", "WanAnimatePipeline", "PixArtAlphaPipeline",
       "MochiPipeline"}  # fmt: skip


def counted_run(case: Any, pipe: Any, models: list[nn.Module], steps: int = 2) -> list[float]:
    """Return what torch's own counter says of the calls of a run."""
    with torch_counts(models) as counts:
        case.run(pipe, 0, steps)
    return counts


def gate_that_serves(case: Any, pipe: Any) -> Combine:
    """Return a gate that the pipeline can have; others are refused, with the reason."""
    reason = BLIND.get(case.name) or NO_STACK.get(case.name)
    if reason:
        with (
            pytest.raises(AttachError, match=reason),
            diffcache.wrapped(pipe, gated("modulated")),
        ):
            case.run(pipe, 0, 2)
    if case.name in NO_STACK:
        return replace(gated("modulated"), site="block")
    return gated("residual" if case.name in BLIND else "modulated")


@pytest.mark.parametrize(
    "name", [name for name in pipes() if not name.endswith(("-heun", "-pndm", "-guided"))]
)  # another solver, or another number, of the same calls
def test_flops_saved_are_those_that_the_calls_lack(name):
    case = pipes()[name]
    pipe = case.build(0)
    models = [getattr(pipe, part) for part in case.denoisers]
    is_variant = "-" in name  # whose modules are those of the pipeline it varies
    is_flex = any(map(_refuses_modes, models))  # which torch's counter cannot run, nor ours
    kinds = 2 if is_variant or name in TWO else 1  # steps that show every kind of call
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        full = [] if is_flex else counted_run(case, pipe, models, kinds) * (2 // kinds)
        for method in (gate_that_serves(case, pipe), *([] if is_variant or is_flex else [MODULES])):
            with diffcache.wrapped(pipe, method):
                case.run(pipe, 0, kinds)  # learns the wiring, which runs the denoiser once more
                if is_flex:
                    assert diffcache.report(pipe).flops_saved is None
                    continue
                cached = counted_run(case, pipe, models)
                report = diffcache.report(pipe)
            assert len(report.calls) == len(full) == len(cached)
            assert report.skipped and report.flops_saved > 0, method
            assert report.flops_saved == pytest.approx(sum(full) - sum(cached), rel=0.01), method


def test_flops_need_an_uncached_and_uncompiled_denoiser(pipe, call):
    with diffcache.wrapped(pipe, TaylorSeer()), pytest.raises(ValueError, match="under a cache"):
        flops.count(pipe, call())
    case = cases()["FluxTransformer2DModel"]
    model = case.build(0)
    inputs = case.kwargs(model, 0)
    assert flops.count(model, inputs).per_step > 0
    model.transformer_blocks[0]._compiled_call_impl = model.transformer_blocks[0].forward
    counted = flops.count(model, inputs)
    assert counted.total is None and "compiled" in counted.reason


def test_a_failed_count_leaves_no_trace():
    module = torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError), flops.counting({"m": module}):
        module(torch.ones(5))
    assert "forward" not in vars(module)
    module.forward = kept = module.forward  # as accelerate leaves it
    with flops.counting({"m": module}) as tally:
        module(torch.ones(7, 2))
    assert tally.calls == [("m", 2 * 7 * 2 * 3)] and vars(module)["forward"] is kept

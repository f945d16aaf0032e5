"""ERTACache on whole pipelines: adjusted times, refusals, calibration that is broken off."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.errors import AttachError
from diffcache.features.ertacache import ERTACache, adjust
from diffcache.features.tables import Tables
from tests.zoo.pipes import pipes

PIPES = pipes()


def tabled(reuse, steps=8, channels=8, **factors):
    """A method whose tables are given: steps reused, factors, maps that do nothing."""
    table = torch.ones(steps, dtype=torch.float64)
    for index, factor in factors.items():
        table[int(index[1:])] = factor
    return table, {
        "reuse": torch.tensor(reuse, dtype=torch.int64),
        "factors_change": table,
        "factors_norm": table,
        "scale": torch.ones(steps, channels),
        "shift": torch.zeros(steps, channels),
        "errors": torch.zeros(steps),
    }


def method_for(pipe, reuse, **factors):
    table, tensors = tabled(reuse, **factors)
    facts = facts_of(pipe.transformer, pipe.scheduler)
    header = {"method": "ertacache", "steps": 8, "threshold": 0.5, **facts}
    return ERTACache(tables=Tables(json.loads(json.dumps(header, default=repr)), tensors)), table


@pytest.fixture
def flux():
    case = PIPES["FluxPipeline"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", diffcache.CacheWarning)
        yield case, case.build(0)


def test_the_model_is_asked_at_the_adjusted_times(flux):
    case, pipe = flux
    case.run(pipe, steps=8)
    nominal = pipe.scheduler.sigmas.clone()
    method, table = method_for(pipe, [2, 3, 5], s2=0.5, s3=0.25, s5=0.0)
    seen = []
    pipe.transformer.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(float(kwargs["timestep"][0])), with_kwargs=True
    )
    with diffcache.wrapped(pipe, method) as handle:
        case.run(pipe, steps=8)
        assert [c.index for c in handle.last.calls if c.computed] == [0, 1, 4, 6, 7]
        times = pipe.scheduler.sigmas
        assert torch.equal(times, adjust(nominal, tuple(table.tolist())))
        assert torch.equal(times[:3], nominal[:3]) and times[3] > nominal[3]
        assert float(times[0] - times[-1]) == float(nominal[0] - nominal[-1])
        assert seen == pytest.approx(times[:8].tolist())
    case.run(pipe, steps=8)
    assert torch.equal(pipe.scheduler.sigmas, nominal)


def test_other_schedulers_and_lengths_are_refused_and_told_the_way_out(flux):
    case, pipe = flux
    method, _ = method_for(pipe, [2], s2=0.5)
    with (
        diffcache.wrapped(pipe, method),
        pytest.raises(AttachError, match="measured in runs of 8 steps, the scheduler has 9"),
    ):
        case.run(pipe, steps=9)
    with pytest.raises(AttachError, match="bare model has no scheduler.*set time=False"):
        diffcache.wrap(pipe.transformer, method)
    sd3 = PIPES["StableDiffusion3Pipeline-heun"].build(0)
    other, _ = method_for(sd3, [2], s2=0.5)
    with pytest.raises(AttachError, match="not with FlowMatchHeun.*set time=False"):
        diffcache.wrap(sd3, other)
    diffcache.unwrap(diffcache.wrap(sd3, replace(other, time=False)))
    scheduler = pipe.scheduler
    pipe.scheduler = type(scheduler).from_config(scheduler.config, stochastic_sampling=True)
    noisy, _ = method_for(pipe, [2], s2=0.5)
    with pytest.raises(AttachError, match="with stochastic_sampling; set time=False"):
        diffcache.wrap(pipe, noisy)


def test_a_scheduler_that_cannot_be_adjusted_is_refused_before_a_pass_is_spent():
    case = PIPES["WanPipeline"]
    pipe, calls = case.build(0), []
    prompt = case.call(pipe, 0, 6)
    prompt.pop("generator", None)
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(AttachError, match="not with UniPCMultistep.*set time=False"):
        diffcache.calibrate(pipe, ERTACache(10.0), [prompt], steps=6)
    assert not calls

"""ERTACache: the time ledger in closed form, its settings, and whole pipelines."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.errors import AttachError, TablesError
from diffcache.features.ertacache import ERTACache, SigmaRule, adjust
from diffcache.features.tables import Tables
from diffcache.offline.ertacache_collect import Profile
from diffcache.step import Step
from tests.features.ertacache_runs import STEPS, curved, loop, made, profile, sigmas
from tests.zoo.pipes import pipes

# the time ledger -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_time_is_conserved_for_any_factors(dtype):
    for seed in range(40):
        torch.manual_seed(seed)
        given = sigmas(24, dtype)
        if seed % 2:
            given = 1 - given  # schedules that count up
        factors = torch.rand(24).tolist()
        after = adjust(given, tuple(factors))
        assert after.dtype == dtype
        assert after[0] == given[0] and after[-1] == given[-1]
        steps = after.diff() * (given[-1] - given[0]).sign()
        assert (steps >= 0).all()
        assert float(after.double().diff().sum()) == pytest.approx(
            float((given[-1] - given[0]).double()), abs=1e-12
        )


def test_factors_of_one_leave_the_times_as_they_are_to_the_bit():
    for dtype in (torch.float32, torch.float64):
        given = sigmas(28, dtype)
        assert torch.equal(adjust(given, (1.0,) * 28), given)
        late = (1.0,) * 20 + (0.5,) + (1.0,) * 7
        assert torch.equal(adjust(given, late)[:21], given[:21])
        assert not torch.equal(adjust(given, late), given)


def test_times_of_a_uniform_schedule_by_hand():
    """Four steps of 1; the second takes half of its share, two steps share what is left."""
    given = torch.tensor([4.0, 3, 2, 1, 0], dtype=torch.float64)
    after = adjust(given, (1.0, 0.5, 1.0, 1.0))
    assert torch.allclose(after, torch.tensor([4.0, 3, 2.5, 1.25, 0], dtype=torch.float64))
    after = adjust(given, (1.0, 0.0, 0.0, 1.0))
    assert torch.allclose(after, torch.tensor([4.0, 3, 3, 3, 0], dtype=torch.float64))


def test_any_split_of_time_ends_a_constant_field_at_the_same_point():
    start = torch.randn(5, dtype=torch.float64)
    slope = torch.randn(5, dtype=torch.float64)
    plain, _ = loop(lambda x, t: slope, start, sigmas())
    for seed in range(5):
        torch.manual_seed(seed)
        times = adjust(sigmas(), tuple(torch.rand(STEPS).tolist()))
        split, _ = loop(lambda x, t: slope, start, times)
        assert torch.allclose(split, plain, atol=1e-12)


def test_bad_factors_are_refused():
    with pytest.raises(ValueError, match="numbers from 0 to 1"):
        adjust(sigmas(3), (1.0, 1.5, 1.0))
    with pytest.raises(ValueError, match=r"must be \[5\]"):
        adjust(sigmas(3), (1.0,) * 4)
    assert torch.equal(SigmaRule((1.0,) * 3).apply(sigmas(3)), sigmas(3))


# settings -------------------------------------------------------------------------------------


def test_threshold_zero_needs_no_tables_and_computes_everything():
    method = ERTACache(0)
    parts = method.parts()
    state = parts.when.init()
    for index in range(20):
        assert parts.when.should_compute(state, Step(index, total=20), None)
        parts.when.computed(state, Step(index, total=20), None)
    assert method.abilities() == (method.parts(),)
    assert Profile(0.0).settings() == {"threshold": 0.0}
    collector = profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.0)
    assert collector.reused() == []
    empty = made(collector)
    assert empty.abilities() == (empty.parts(),) and len(empty.parts().when.steps) == STEPS


def test_uniform_computes_as_many_steps_at_even_distances():
    listed = made(profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.5))
    even = replace(listed, schedule="uniform", time=False, rectify=False)
    count = len(listed.parts().when.steps)
    steps = sorted(even.parts().when.steps)
    assert 1 < count < STEPS and len(steps) == count and steps[0] == 0
    gaps = {b - a for a, b in zip(steps, [*steps[1:], STEPS], strict=True)}
    assert max(gaps) - min(gaps) <= 1
    assert even.abilities() == (even.parts(),)


def test_foreign_tables_are_refused():
    collector = profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.5)
    method = made(collector)
    with pytest.raises(TablesError, match="made with threshold=0.5, not 0.2; leave threshold out"):
        replace(method, threshold=0.2)
    assert replace(method, threshold=0.5).parts() == method.parts()
    instead = method.parts().instead
    with pytest.raises(TablesError, match="made for 2 channels, the output .* has 5"):
        instead.correct(instead.init(), Step(3), torch.zeros(1, 5, 3, 3))


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

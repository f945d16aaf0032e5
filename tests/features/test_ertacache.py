"""ERTACache: the time ledger and its tables in closed form, its settings, and whole pipelines."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.errors import AttachError
from diffcache.features.collect import RunInfo
from diffcache.features.ertacache import ERTACache, Rectified, SigmaRule, adjust
from diffcache.features.tables import Tables
from diffcache.offline.ertacache_collect import Profile, factor_of, fitted
from diffcache.step import Step
from tests.internals import noting
from tests.zoo.pipes import pipes

STEPS = 10


def made(collector, steps=STEPS, **settings):
    header = {"method": "ertacache", "steps": steps, **collector.settings()}
    return ERTACache(tables=Tables(header, collector.tables()), **settings)


def sigmas(steps=STEPS, dtype=torch.float64):
    return torch.linspace(1, 0, steps + 1, dtype=dtype) ** 1.3


def loop(field, start, times, stand_in=None):
    """Sample with Euler's method; `stand_in(index, x, v)` may replace the output."""
    x, seen = start.clone(), []
    for index in range(len(times) - 1):
        v = field(x, float(times[index]))
        out = v if stand_in is None else stand_in(index, x, v)
        seen.append(out)
        x = x + (times[index + 1] - times[index]) * out
    return x, seen


def profile(field, starts, threshold, branches=1):
    """Drive the collector as calibration does."""
    collector = Profile(ERTACache(threshold))
    for number in range(collector.passes):
        for prompt, start in enumerate(starts):
            run_once(collector, field, start, sigmas(), number, prompt, branches)
    assert collector.total == STEPS
    return collector


def run_once(collector, field, start, times, number, prompt, branches=1):
    steps = len(times) - 1
    collector.begin(RunInfo(number, prompt, times[:-1] * 1000, times, steps))

    def stand_in(index, x, v):
        outs = []
        for branch in range(branches):
            step = Step(index, total=steps, branch=branch)
            value = v if branch == 0 else v * (1 + branch)
            out = collector.output(step, x, value)
            outs.append(value if out is None else out)
        return outs[0]

    loop(field, start, times, stand_in)
    collector.end()


def curved(x, t):
    return torch.sin(3 * x + t) + x * t


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
        assert float(after.double().diff().sum()) == pytest.approx(float((given[-1] - given[0]).double()), abs=1e-12)


def test_factors_of_one_leave_the_times_as_they_are_to_the_bit():
    for dtype in (torch.float32, torch.float64):
        given = sigmas(28, dtype)
        assert torch.equal(adjust(given, (1.0,) * 28), given)
        late = (1.0,) * 20 + (0.5,) + (1.0,) * 7
        assert torch.equal(adjust(given, late)[:21], given[:21])
        assert not torch.equal(adjust(given, late), given)
    assert torch.equal(SigmaRule((1.0,) * 3).apply(sigmas(3)), sigmas(3))


def test_times_of_a_uniform_schedule_by_hand():
    """Four steps of 1; the second takes half of its share, two steps share what is left."""
    given = torch.tensor([4.0, 3, 2, 1, 0], dtype=torch.float64)
    after = adjust(given, (1.0, 0.5, 1.0, 1.0))
    assert torch.allclose(after, torch.tensor([4.0, 3, 2.5, 1.25, 0], dtype=torch.float64))
    after = adjust(given, (1.0, 0.0, 0.0, 1.0))
    assert torch.allclose(after, torch.tensor([4.0, 3, 3, 3, 0], dtype=torch.float64))


def test_threshold_zero_needs_no_tables_and_computes_everything():
    method = ERTACache(0)
    parts = method.parts()
    state = parts.when.init()
    for index in range(20):
        assert parts.when.should_compute(state, Step(index, total=20), None)
        parts.when.computed(state, Step(index, total=20), None)
    assert method.abilities() == (method.parts(),)
    assert Profile(ERTACache(0.0)).settings() == {"threshold": 0.0}
    collector = profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.0)
    assert collector.reused() == []
    empty = made(collector)
    assert empty.abilities() == (empty.parts(),) and len(empty.parts().when.steps) == STEPS


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
    with noting(pipe.transformer) as seen, diffcache.wrapped(pipe, method) as handle:
        case.run(pipe, steps=8)
        assert [c.index for c in handle.last.calls if c.computed] == [0, 1, 4, 6, 7]
        times = pipe.scheduler.sigmas
        assert torch.equal(times, adjust(nominal, tuple(table.tolist())))
        assert torch.equal(times[:3], nominal[:3]) and times[3] > nominal[3]
        assert float(times[0] - times[-1]) == float(nominal[0] - nominal[-1])
        assert [float(given["timestep"][0]) for given in seen] == pytest.approx(times[:8].tolist())
    case.run(pipe, steps=8)
    assert torch.equal(pipe.scheduler.sigmas, nominal)


def test_a_scheduler_that_cannot_be_adjusted_is_refused_before_a_pass_is_spent():
    case = PIPES["WanPipeline"]
    pipe, calls = case.build(0), []
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(AttachError, match="not with UniPCMultistep.*set time=False"):
        diffcache.calibrate(pipe, ERTACache(10.0), [case.prompt(pipe, 0, 6)], steps=6)
    assert not calls
    sd3 = PIPES["StableDiffusion3Pipeline-heun"].build(0)
    method, _ = method_for(sd3, [2], s2=0.5)
    diffcache.unwrap(diffcache.wrap(sd3, replace(method, time=False)))  # the way out


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 4, 2, 3, 3), (2, 7, 4)])
def test_rectification_is_exact_for_affine_errors(shape):
    """If the error is p * guess + q in every channel, the mapped guess is the truth."""
    axis = 1 if len(shape) > 3 else 2
    wide = [1] * len(shape)
    wide[axis] = shape[axis]
    torch.manual_seed(3)
    p = (0.3 * torch.randn(shape[axis], dtype=torch.float64)).view(wide)
    q = torch.randn(shape[axis], dtype=torch.float64).view(wide)
    collector = Profile(ERTACache(math.inf))
    for number in range(3):
        for prompt in range(2):
            collector.begin(RunInfo(number, prompt, torch.zeros(4), None, 4))
            for index in range(4):
                given = torch.randn(shape, dtype=torch.float64)
                live = collector._live.get(0)
                kept = None if live is None else live.residual
                guess = given if kept is None else given + kept
                collector.output(Step(index, total=4), given, guess - (p * guess + q))
            collector.end()
    tables = made(collector, steps=4).tables
    instead = Rectified(tables)
    state = instead.init()
    for index in (1, 2):
        guess = 7 * torch.randn(shape, dtype=torch.float64)
        found = instead.correct(state, Step(index), guess)
        assert found.shape == guess.shape
        assert float((found - (guess - (p * guess + q))).abs().max()) < 1e-12 * 7 * 10
    same = instead.correct(state, Step(0), guess)
    assert torch.equal(same, guess)


def test_factors_stay_within_their_bounds():
    assert factor_of(0.0, 0.0) == 1 and factor_of(0.0, 3.0) == 1
    assert factor_of(1.0, 0.0) == 0 and factor_of(5.0, 4.0) == 0
    assert factor_of(1.0, 4.0) == 0.75
    starts = [torch.randn(1, 2, 3, 3, dtype=torch.float64) for _ in range(3)]
    tables = profile(curved, starts, 0.5).tables()
    reused = tables["reuse"].tolist()
    assert reused
    for name in ("factors_change", "factors_norm"):
        assert float(tables[name].min()) >= 0 and float(tables[name].max()) <= 1
        assert all(tables[name][i] == 1 for i in range(STEPS) if i not in reused)
    assert (
        made(profile(curved, starts, 0.5), reading="B").abilities()[1]
        != made(profile(curved, starts, 0.5), reading="A").abilities()[1]
    )


def test_the_closed_loop_follows_an_independent_one(agrees):
    """Errors, list and factors of two prompts by loops written here."""
    torch.manual_seed(5)
    starts = [torch.randn(1, 2, 3, 3, dtype=torch.float64) for _ in range(2)]
    times, threshold = sigmas(), 0.35
    errors = torch.zeros(2, STEPS, dtype=torch.float64)
    for number, start in enumerate(starts):
        x, norms = start.clone(), []
        for i in range(STEPS):
            v = curved(x, float(times[i]))
            norms.append((v - x).abs().sum())
            x = x + (times[i + 1] - times[i]) * v
        x = start.clone()
        for i in range(STEPS):
            v = curved(x, float(times[i]))
            out = v
            if 0 < i < STEPS - 1:
                errors[number, i] = (kept - (v - x)).abs().sum() / norms[i]  # noqa: F821
                if errors[number, i] < threshold:
                    out = x + kept  # noqa: F821
            if out is v:
                kept = v - x
            x = x + (times[i + 1] - times[i]) * out
    reuse = [i for i in range(1, STEPS - 1) if errors[:, i].mean() < threshold]
    factors = torch.ones(2, STEPS, dtype=torch.float64)
    for number, start in enumerate(starts):
        x, last = start.clone(), None
        for i in range(STEPS):
            v = curved(x, float(times[i]))
            out = v
            if i in reuse:
                out = x + kept
                ratio = (out - v).abs().sum() / (v - last).abs().sum()
                factors[number, i] = (1 - ratio).clamp(0, 1)
            else:
                kept = v - x
            last, x = v, x + (times[i + 1] - times[i]) * out
    tables = profile(curved, starts, threshold).tables()
    assert 0 < len(reuse) < STEPS - 2
    found, wanted = (tables["errors"], tables["factors_change"]), (errors.mean(0), factors.mean(0))
    steps = tables["reuse"].tolist(), reuse
    agrees("ertacache", "calibration of the paper, as a loop", found, wanted, 1e-12, steps)


def test_a_run_that_breaks_off_leaves_no_trace_in_the_sums():
    starts = [torch.randn(1, 2, 3, 3, dtype=torch.float64)]
    whole, collector = profile(curved, starts, 0.4).tables(), Profile(ERTACache(0.4))
    for number in range(3):
        collector.begin(RunInfo(number, 0, sigmas()[:-1], sigmas(), STEPS))
        for index in range(4):
            collector.output(Step(index, total=STEPS), starts[0], starts[0].cos())
        run_once(collector, curved, starts[0], sigmas(), number, 0)
    for name, table in collector.tables().items():
        assert torch.equal(table, whole[name]), name


def test_outputs_of_other_shapes_are_taken_against_what_they_share():
    given, more = torch.randn(1, 4, 3, 3), torch.randn(1, 6, 3, 3)
    assert torch.equal(fitted(more, given), more[:, :4])
    wide = fitted(given, more)
    assert torch.equal(wide[:, :4], given) and not wide[:, 4:].any()


def test_uniform_computes_as_many_steps_at_even_distances():
    listed = made(profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.5))
    even = replace(listed, schedule="uniform", time=False, rectify=False)
    count = len(listed.parts().when.steps)
    steps = sorted(even.parts().when.steps)
    assert 1 < count < STEPS and len(steps) == count and steps[0] == 0
    gaps = {b - a for a, b in zip(steps, [*steps[1:], STEPS], strict=True)}
    assert max(gaps) - min(gaps) <= 1
    assert even.abilities() == (even.parts(),)


def test_branches_keep_their_own_residuals_and_share_the_rest():
    start = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    one, two = profile(curved, [start], 0.5), profile(curved, [start], 0.5, branches=2)
    assert one.reused() == two.reused()
    step = one.reused()[0]
    assert two._maps[step].count == 2 * one._maps[step].count
    assert two._sums[2, step] == 2

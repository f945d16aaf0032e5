"""Measurement of ERTACache's tables: list, factors and maps, against closed forms and loops."""

import math

import pytest
import torch

from diffcache.errors import AttachError
from diffcache.features.collect import RunInfo
from diffcache.features.ertacache import Rectified
from diffcache.features.tables import Tables
from diffcache.offline.ertacache_collect import Profile, factor_of, fitted
from diffcache.step import Step
from tests.features.ertacache_runs import STEPS, curved, loop, made, profile, run_once, sigmas

# the list, the factors, the maps --------------------------------------------------------------


def test_a_constant_residual_is_reused_exactly_at_every_inner_step():
    shift = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    starts = [torch.randn(1, 3, 4, 4, dtype=torch.float64) for _ in range(2)]
    collector = profile(lambda x, t: x + shift, starts, 1e-9)
    tables = collector.tables()
    assert tables["reuse"].tolist() == list(range(1, STEPS - 1))
    assert float(tables["errors"].max()) < 1e-12
    assert torch.equal(tables["factors_change"] > 1 - 1e-9, torch.ones(STEPS, dtype=torch.bool))
    method = made(collector)
    parts = method.parts()
    assert parts.when.steps == (0, STEPS - 1) and parts.when.total == STEPS
    assert replay(method, lambda x, t: x + shift, starts[0])[0].allclose(
        loop(lambda x, t: x + shift, starts[0], sigmas())[0], atol=1e-9
    )


def replay(method, field, start, times=None):
    """Sample as the engine does at site MODEL with `change`; return the end and all outputs."""
    times = sigmas() if times is None else times
    for rule in method.abilities()[1:]:
        times = rule.apply(times)
    parts = method.parts()
    when, instead, state = parts.when.init(), parts.instead, parts.instead.init()

    def stand_in(index, x, v):
        step = Step(index, total=len(times) - 1)
        if parts.when.should_compute(when, step, None):
            parts.when.computed(when, step, None)
            instead.record(state, step, v - x)
            return v
        return instead.correct(state, step, x + instead.estimate(state, step))

    return loop(field, start, times, stand_in)


def test_the_sign_of_what_is_kept():
    """A constant velocity is not a constant residual: reuse is off by the way since the anchor."""
    slope = torch.full((1, 2, 3, 3), 0.25, dtype=torch.float64)
    collector = profile(lambda x, t: slope, [torch.ones(1, 2, 3, 3).double()], 10.0)
    method = made(collector, time=False, rectify=False)
    x, seen = torch.ones(1, 2, 3, 3).double(), []
    _, outs = replay(method, lambda x, t: slope, x)
    times = sigmas()
    for index in range(1, STEPS - 1):  # v~ = x + (v - x_anchor), x_anchor the start
        seen.append(outs[index] - slope)
        moved = sum((times[i + 1] - times[i]) * outs[i] for i in range(index))
        assert torch.allclose(seen[-1], moved, atol=1e-12)
        assert float(moved.abs().max()) > 1e-3


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 4, 2, 3, 3), (2, 7, 4)])
def test_rectification_is_exact_for_affine_errors(shape):
    """If the error is p * guess + q in every channel, the mapped guess is the truth."""
    axis = 1 if len(shape) > 3 else 2
    wide = [1] * len(shape)
    wide[axis] = shape[axis]
    torch.manual_seed(3)
    p = (0.3 * torch.randn(shape[axis], dtype=torch.float64)).view(wide)
    q = torch.randn(shape[axis], dtype=torch.float64).view(wide)
    collector = Profile(math.inf)
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


def test_half_precision_outputs_are_mapped_in_float32():
    tables = Tables(
        {"method": "ertacache", "steps": 2, "threshold": 1.0},
        {"scale": torch.full((2, 3), 1.001), "shift": torch.full((2, 3), 0.01)},
    )
    guess = torch.randn(1, 5, 3).bfloat16()
    found = Rectified(tables).correct(Rectified(tables).init(), Step(1), guess)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (guess.float() * 1.001 + 0.01).bfloat16())


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


def test_the_closed_loop_follows_an_independent_one():
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
    assert tables["reuse"].tolist() == reuse
    assert torch.allclose(tables["errors"], errors.mean(0), atol=1e-12)
    assert torch.allclose(tables["factors_change"], factors.mean(0), atol=1e-12)


def test_replay_repeats_the_stand_ins_of_the_last_pass():
    start = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    collector = profile(curved, [start], 0.5)
    method = made(collector, time=False, rectify=False)
    seen = []
    collector.begin(RunInfo(2, 0, sigmas()[:-1], sigmas(), STEPS))

    def stand_in(index, x, v):
        out = collector.output(Step(index, total=STEPS), x, v)
        seen.append(v if out is None else out)
        return seen[-1]

    loop(curved, start, sigmas(), stand_in)
    _, outs = replay(method, curved, start)
    assert collector.reused()
    assert all(torch.equal(one, other) for one, other in zip(seen, outs, strict=True))


def test_branches_keep_their_own_residuals_and_share_the_rest():
    start = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    one, two = profile(curved, [start], 0.5), profile(curved, [start], 0.5, branches=2)
    assert one.reused() == two.reused()
    step = one.reused()[0]
    assert two._maps[step].count == 2 * one._maps[step].count
    assert two._sums[2, step] == 2


def test_an_interrupted_calibration_goes_on():
    starts = [torch.randn(1, 2, 3, 3, dtype=torch.float64) for _ in range(3)]
    whole = profile(curved, starts, 0.4).tables()
    for stop in (1, 4, 7, 8):
        state = {k: v.clone() for k, v in profile(curved, starts, 0.4, stop=stop).state().items()}
        collector, runs = Profile(0.4), 0
        collector.load(state)
        for number in range(3):
            for prompt, start in enumerate(starts):
                if runs >= stop:
                    run_once(collector, curved, start, sigmas(), number, prompt)
                runs += 1
        for name, table in collector.tables().items():
            assert torch.equal(table, whole[name]), name


def test_a_run_that_breaks_off_leaves_no_trace_in_the_sums():
    starts = [torch.randn(1, 2, 3, 3, dtype=torch.float64)]
    whole, collector = profile(curved, starts, 0.4).tables(), Profile(0.4)
    for number in range(3):
        collector.begin(RunInfo(number, 0, sigmas()[:-1], sigmas(), STEPS))
        for index in range(4):
            collector.output(Step(index, total=STEPS), starts[0], starts[0].cos())
        run_once(collector, curved, starts[0], sigmas(), number, 0)
    for name, table in collector.tables().items():
        assert torch.equal(table, whole[name]), name


def test_other_lengths_of_runs_are_refused():
    collector = profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.5)
    with pytest.raises(ValueError, match="a run of 4 steps after runs of 10"):
        collector.begin(RunInfo(0, 0, torch.zeros(4), None, 4))


def test_outputs_of_other_shapes_are_taken_against_what_they_share():
    given, more = torch.randn(1, 4, 3, 3), torch.randn(1, 6, 3, 3)
    assert torch.equal(fitted(more, given), more[:, :4])
    wide = fitted(given, more)
    assert torch.equal(wide[:, :4], given) and not wide[:, 4:].any()
    with pytest.raises(AttachError, match=r"\[2, 9\] cannot be taken against the sample"):
        fitted(given, torch.zeros(2, 9))

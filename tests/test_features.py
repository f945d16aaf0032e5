"""Schedules and forecasts against closed forms; no network involved."""

import math

import pytest
import torch

import diffcache
from diffcache import Every, Gate, Listed, Newton, Reuse, Step, Taylor, TaylorSeer
from diffcache.catalog import make_method, method_class
from diffcache.features.parts.when import relative_l1
from diffcache.registry import rows_of
from tests.internals import computed_steps


@pytest.mark.parametrize(
    ("total", "warmup", "every", "steps"),
    [
        (50, 3, 6, [0, 1, 2, 8, 14, 20, 26, 32, 38, 44]),
        (50, 1, 5, list(range(0, 50, 5))),
        (50, 2, 4, [0, *range(1, 50, 4)]),
        (50, 3, 3, [0, 1, *range(2, 50, 3)]),
        (28, 3, 5, [0, 1, 2, 7, 12, 17, 22, 27]),
        (6, 9, 5, list(range(6))),
        (7, 1, 1, list(range(7))),
    ],
)
def test_golden_schedules_of_the_official_code(total, warmup, every, steps):
    assert computed_steps(Every(every, warmup), total) == steps
    assert computed_steps(TaylorSeer(every=every, warmup=warmup).parts().when, total) == steps


def test_listed_steps_always_start_with_the_first():
    assert computed_steps(Listed([7, 3]), 10) == [0, 3, 7]


def forecasts(instead, steps, total, feature):
    """Return {skipped step: (estimate, truth)} in float64."""
    state, found = instead.init(), {}
    for index in range(total):
        truth = torch.tensor([feature(index)], dtype=torch.float64)
        if index in steps:
            instead.record(state, Step(index), truth.clone())
        else:
            found[index] = (instead.estimate(state, Step(index)).item(), truth.item())
    return found


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [[0, 4, 8, 12, 16], [0, 1, 2, 8, 14], [0, 1, 5, 6, 13]])
def test_newton_is_exact_on_polynomials_at_any_spacing(order, steps):
    found = forecasts(Newton(order), steps, 24, lambda s: (0.3 * s - 1) ** order + s)
    for index, (estimate, truth) in found.items():
        if sum(s < index for s in steps) > order:
            assert estimate == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_taylor_is_exact_on_affine_features_and_no_further(order):
    steps = [0, 4, 8, 12]
    for index, (estimate, truth) in forecasts(Taylor(order), steps, 24, lambda s: 3 - 2 * s).items():
        if index > steps[1]:
            assert estimate == pytest.approx(truth, abs=1e-9)


def test_taylor_of_order_two_misses_a_quadratic_by_the_known_amount():
    slope, spacing = 0.7, 4
    for index, (estimate, truth) in forecasts(Taylor(2), [0, 4, 8], 12, lambda s: slope * s * s).items():
        if index > 8:
            assert estimate - truth == pytest.approx(-slope * spacing * (index - 8), rel=1e-9)


def test_differences_start_one_step_before_the_warmup_ends():
    instead = TaylorSeer(every=6, order=2, warmup=3).parts().instead
    state, depths = instead.init(), []
    for index in [0, 1, 2, 8, 14]:
        instead.record(state, Step(index), torch.zeros(1))
        depths.append(len(state.factors))
    assert depths == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("instead", [Reuse(), Taylor(0), Newton(0)])
def test_order_zero_is_reuse(instead):
    found = forecasts(instead, [0, 3, 6], 9, math.sin)
    assert {i: e for i, (e, _) in found.items()} == {i: pytest.approx(math.sin(i - i % 3)) for i in found}


def test_batched_estimates_equal_single_ones():
    torch.manual_seed(1)
    instead, step = Taylor(2), Step(9)
    states = [instead.init() for _ in range(5)]
    for index in (0, 1, 4):
        for state in states:
            instead.record(state, Step(index), torch.randn(2, 3))
    for one, many in zip([instead.estimate(s, step) for s in states], instead.estimate_all(states, step), strict=True):
        assert torch.equal(one, many)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_relative_l1_is_a_ratio_of_two_norms_in_float32(dtype):
    guess, probe = torch.randn(2, 300, 9).to(dtype)
    for relative_to, reference in (("forecast", guess), ("probe", probe)):
        change = torch.dist(guess.float(), probe.float(), 1)
        scale = torch.linalg.vector_norm(reference.float(), 1)
        assert relative_l1(guess, probe, relative_to) == float(change) / float(scale)


def test_relative_l1_of_zeros_and_nan():
    zero, one, nan = torch.zeros(2), torch.ones(2), torch.full((2,), math.nan)
    assert relative_l1(zero, zero) == 0
    assert relative_l1(one, zero) == math.inf
    assert relative_l1(one, one * 2, "forecast") == 1
    assert relative_l1(one, one * 2, "probe") == 0.5
    state = (when := Gate(0.5)).init()
    when.computed(state, Step(0), one)
    assert when.should_compute(state, Step(1), nan)


@pytest.mark.parametrize("name", rows_of("method"))
def test_repr_is_python(name):
    method = make_method(name)
    assert eval(repr(method), {n: getattr(diffcache, n) for n in dir(diffcache)}) == method
    assert method_class(name).name == name
    assert method.bibtex.startswith("@")

"""Fitted forecasts: exact where they must be, the best schedule, and files that work again."""

from itertools import combinations

import pytest
import torch

from diffcache import Step
from diffcache.features.collect import RunInfo
from diffcache.features.fitted import FittedForecast, Weighted
from diffcache.features.parts.fit import Fit
from diffcache.features.serialize import to_plain
from diffcache.features.tables import Tables
from diffcache.features.tuned import Tuned
from diffcache.offline.fitted_collect import moves

TOTAL = 9


def products(curves):
    """Inner products of features whose entries are polynomials of the step, [T, T]."""
    steps = torch.arange(TOTAL, dtype=torch.float64)
    features = torch.stack([sum(c * steps**p for p, c in enumerate(curve)) for curve in curves], 1)
    return features @ features.T, features


def tables(**more):
    header = {"method": "fitted-forecast", "steps": TOTAL, "site": "stack", **more}
    inner, _ = products([(1, 2, -0.3), (0, -1, 0.2), (4, 0, 0.1)])
    return Tables(header, {"products": inner, "moves": torch.ones(TOTAL)})


def test_weights_are_those_of_least_squares():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(TOTAL, 40, generator=generator, dtype=torch.float64)
    fit = Fit(features @ features.T, torch.ones(TOTAL), 3, 1e-14)
    found = fit.coefficients((6, 4, 1))[:, 8]
    past = (features[[4, 1]] - features[6]).T
    expected = torch.linalg.lstsq(past, (features[8] - features[6])[:, None]).solution[:, 0]
    assert torch.allclose(found[1:], expected)
    assert torch.allclose(found[0], 1 - expected.sum())


@pytest.mark.parametrize("history", [1, 2, 3])
@pytest.mark.parametrize("computed", [1, 2, 4, TOTAL])
def test_the_programme_equals_brute_force(history, computed, agrees):
    generator = torch.Generator().manual_seed(history)
    features = torch.randn(TOTAL, 5, generator=generator, dtype=torch.float64).cumsum(0)
    speed = torch.rand(TOTAL, generator=generator)
    fit = Fit(features @ features.T, speed, history, 1e-3)

    def cost(steps):
        total = 0.0
        for number, first in enumerate(steps):
            end = steps[number + 1] if number + 1 < len(steps) else TOTAL
            anchors = tuple(reversed(steps[: number + 1]))[:history]
            weights = fit.coefficients(anchors)
            gap = torch.zeros(5, dtype=torch.float64)
            for step in range(first + 1, end):
                gap += speed[step] * (weights[:, step] @ features[list(anchors)] - features[step])
            total += float(gap @ gap)
        return total

    every = [(0, *rest) for rest in combinations(range(1, TOTAL), computed - 1)]
    best, found = min(map(cost, every)), cost(fit.schedule(computed))
    costs = [torch.tensor([found])], [torch.tensor([best])]
    agrees("fitted-forecast", "all schedules, with its own costs", *costs, 1e-9)


def test_the_stand_in_is_the_weighted_sum():
    instead = Weighted(((3, (2, 0), (1.5, -0.5)),), 2)
    state = instead.init()
    a, b = torch.ones(3), torch.full((3,), 4.0)
    instead.record(state, Step(0), a)
    instead.record(state, Step(2), b)
    assert torch.equal(instead.estimate(state, Step(2)), b)
    assert torch.equal(instead.estimate(state, Step(3)), 1.5 * b - 0.5 * a)
    assert instead.held(state) == [b, a]


def test_moves_follow_the_noise_levels():
    sigmas = torch.tensor([1.0, 0.5, 0.25, 0.0])
    run = RunInfo(0, 0, torch.arange(3.0), sigmas, 3)
    assert moves(run).tolist() == [-0.5, -0.25, -0.25]
    assert moves(RunInfo(0, 0, torch.arange(3.0), None, 3)).tolist() == [1, 1, 1]


def test_one_calibration_serves_every_setting():
    measured = tables()
    for computed in (3, 5):
        parts = FittedForecast(computed=computed, history=3, tables=measured).parts()
        assert len(parts.when.steps) == computed and parts.when.total == TOTAL


def test_a_tuned_method_survives_a_file(tmp_path):
    method = FittedForecast(computed=4, history=3, tables=tables())
    tensors = {}
    header = {"method": "tuned", "steps": TOTAL, "front": [], "choice": to_plain(method, tensors)}
    saved = Tables(header, tensors).save(tmp_path / "a.safetensors")
    again = Tuned(str(tmp_path / "a.safetensors"))
    assert again == Tuned(saved) and again.total == TOTAL
    assert again.method == method
    assert again.parts() == method.parts()
    assert eval(repr(again), {"Tuned": Tuned}) == again

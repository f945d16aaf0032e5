"""Bootstrap intervals: coverage on known distributions, twins by gathering, and pairing."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffcache.eval.metrics.bootstrap import (
    Interval,
    frechet_between,
    frechet_change,
    frechet_interval,
    mean_interval,
)
from diffcache.eval.metrics.frechet import Moments, frechet, moments
from tests.picture_files import normal

DIM = 6
REFERENCE = Moments(torch.zeros(DIM).double(), torch.eye(DIM).double(), 10**9)


def interval(statistic: Callable[[Tensor], float], n: int, resamples: int) -> Interval:
    """Resample sample ids one by one and lay the quantiles around the point value."""
    generator = torch.Generator().manual_seed(0)
    drawn = [statistic(ids) for ids in torch.randint(n, (resamples, n), generator=generator)]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(torch.tensor(drawn, dtype=torch.float64), ends).tolist()
    value = statistic(torch.arange(n))
    mean = sum(drawn) / resamples
    return Interval(value, value + low - mean, value + high - mean, n)


def test_mean_intervals_hold_the_true_mean_19_times_in_20() -> None:
    found = [mean_interval(normal(60, seed=s) + 3, resamples=300, seed=s) for s in range(400)]
    hits = sum(not i.excludes(3) for i in found)
    assert 0.91 <= hits / 400 <= 0.97
    assert all(i.low < i.value < i.high and i.n == 60 for i in found)


def test_frechet_intervals_hold_the_expected_distance_19_times_in_20() -> None:
    def sample(seed: int) -> Tensor:
        return normal(200, DIM, seed=seed) * 1.3 + 0.4

    expected = torch.tensor([frechet(moments(sample(s)), REFERENCE) for s in range(600)]).mean()
    found = [frechet_interval(sample(s), REFERENCE, 100, seed=s) for s in range(5000, 5100)]
    hits = sum(not i.excludes(float(expected)) for i in found)
    assert 0.89 <= hits / 100 <= 0.99


def test_the_width_is_that_of_the_normal_law() -> None:
    found = mean_interval(normal(2000), resamples=4000)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 / 2000**0.5, rel=0.08)


def test_fast_frechet_intervals_are_the_plain_bootstrap() -> None:
    a, b = normal(80, DIM) * 1.2 + 0.3, normal(80, DIM) * 1.3 + 0.3 + 0.1 * normal(80, DIM, seed=1)

    def to(features: Tensor, ids: Tensor) -> float:
        return frechet(moments(features[ids]), REFERENCE)

    close = {"rel": 1e-8, "abs": 1e-10}
    expected = interval(lambda ids: to(a, ids), 80, 60).to_dict()
    assert frechet_interval(a, REFERENCE, 60).to_dict() == pytest.approx(expected, **close)
    expected = interval(lambda ids: to(b, ids) - to(a, ids), 80, 60).to_dict()
    assert frechet_change(a, b, REFERENCE, 60).to_dict() == pytest.approx(expected, **close)
    expected = interval(lambda ids: frechet(moments(a[ids]), moments(b[ids])), 80, 60).to_dict()
    assert frechet_between(a, b, 60).to_dict() == pytest.approx(expected, **close)
    expected = interval(lambda ids: float(a[ids, 0].mean()), 80, 60).to_dict()
    assert mean_interval(a[:, 0], 60).to_dict() == pytest.approx(expected, **close)


def test_the_point_value_lies_inside_where_a_percentile_interval_would_miss_it() -> None:
    features = normal(100, DIM, seed=2)  # at the floor: resampling doubles the distance
    point = frechet(moments(features), REFERENCE)
    drawn = []
    interval(lambda ids: drawn.append(frechet(moments(features[ids]), REFERENCE)) or 0.0, 100, 200)
    assert torch.tensor(drawn[:-1]).quantile(0.025) > point
    found = frechet_interval(features, REFERENCE, 200)
    assert found.value == pytest.approx(point, rel=1e-12) and found.low < point < found.high


def test_the_point_value_lies_inside_however_skewed() -> None:
    skewed = torch.zeros(1000)
    skewed[0] = 1e6
    found = mean_interval(skewed)
    assert found.low <= found.value <= found.high
    flat = mean_interval(torch.full((50,), 0.1))
    assert flat.low <= flat.value <= flat.high and flat.high - flat.low < 1e-12


def test_a_planted_shift_is_found_and_an_equal_distribution_is_not() -> None:
    a = normal(300, DIM)
    small = frechet_change(a, a + 0.1 + 0.02 * normal(300, DIM, seed=1), REFERENCE, 300)
    assert small.low > 0
    back = frechet_change(a + 0.1, a, REFERENCE, 300)
    assert back.high < 0
    fresh = normal(300, DIM, seed=3)
    assert not frechet_change(a, fresh, REFERENCE, 300).excludes(0)
    # The same shift drowns in the intervals of the two distances on their own.
    alone = [frechet_interval(x, REFERENCE, 300) for x in (a, a + 0.1)]
    assert alone[0].high > alone[1].low


def test_equal_features_do_not_differ_at_all() -> None:
    features = normal(40, 64)  # rank below the size
    zero = Interval(0.0, 0.0, 0.0, 40)
    assert frechet_between(features, features.clone(), 20) == zero
    reference = moments(normal(500, 64, seed=1))
    assert frechet_change(features, features.clone(), reference, 20) == zero


def test_the_seed_decides_and_blocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(50)
    first = mean_interval(values, 100)
    assert first == mean_interval(values, 100) != mean_interval(values, 100, seed=1)
    assert json.loads(json.dumps(first.to_dict())) == {
        "value": first.value, "low": first.low, "high": first.high, "n": 50,
    }  # fmt: skip
    monkeypatch.setattr("diffcache.eval.metrics.bootstrap.DRAWN_AT_ONCE", 170)
    assert mean_interval(values, 100).to_dict() == pytest.approx(first.to_dict(), rel=1e-12)

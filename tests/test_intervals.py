"""Intervals of shares and of metrics: Wilson's own numbers, coverage, and how far other samples would move them."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffcache.eval.metrics.bootstrap import Interval, frechet_between, frechet_change, frechet_interval, mean_interval
from diffcache.eval.metrics.catalog import METRICS
from diffcache.eval.metrics.frechet import Moments, frechet, moments
from diffcache.eval.metrics.intervals import _BOUNDS, _SHARES, is_wilson, metric_interval, share_change, share_interval
from tests.picture_files import normal


def outcomes(right: int, count: int) -> torch.Tensor:
    return torch.arange(count) < right


def test_independent_outcomes_have_wilsons_interval() -> None:
    # scipy.stats.binomtest(81, 263).proportion_ci(method="wilson")
    found = share_interval(outcomes(81, 263))
    assert (found.low, found.high) == pytest.approx((0.25528852, 0.36620958), abs=1e-7)
    assert found.value == 81 / 263 and found.n == 263


@pytest.mark.parametrize("hits", [torch.ones(512), torch.zeros(64, 4, dtype=torch.bool)])
def test_a_share_at_an_end_has_an_interval_within_the_range(hits: torch.Tensor) -> None:
    found = share_interval(hits)
    assert 0 <= found.low < found.high <= 1
    assert found.value in (found.low, found.high)
    wilson = 1.959964**2 / (hits.numel() + 1.959964**2)
    assert found.high - found.low == pytest.approx(wilson, rel=1e-6)


def test_intervals_of_clusters_hold_the_true_share_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = plain = 0
    for _ in range(600):
        chances = (torch.rand(64, 1, generator=generator) < 0.9).double() * 0.8  # of a context
        hits = torch.rand(64, 8, generator=generator) < chances
        inside += not share_interval(hits).excludes(0.72)
        plain += not share_interval(hits.flatten()).excludes(0.72)
    assert 0.92 <= inside / 600 <= 0.98
    assert plain / 600 < 0.85  # what the clusters are for


def test_a_change_is_of_the_same_samples_and_knows_that_others_may_change() -> None:
    before = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.9
    after = before & (torch.arange(300) % 5 > 0)
    lost = int((before & ~after).sum())
    found = share_change(before, after)
    assert found.value == pytest.approx(-lost / 300) and found.high < 0
    assert found.n == 300 and share_change(after, before).value == pytest.approx(lost / 300)
    # Bonett and Price's shares of pairs that changed either way
    one, other = 1 / 302, (lost + 1) / 302
    half = 1.959964 * math.sqrt((one + other - (one - other) ** 2) / 302)
    assert (found.low, found.high) == pytest.approx((one - other - half, one - other + half))
    same = share_change(before, before)
    assert same.value == 0 and -0.02 < same.low < 0 < same.high < 0.02


def test_intervals_end_where_the_metric_does() -> None:
    near_cap = torch.full((200,), 100.0)
    near_cap[:3] = torch.tensor([99.9, 99.9, 60.0])
    assert mean_interval(near_cap).high > 100
    found = metric_interval("psnr_db", near_cap)
    assert found.low < found.value < found.high == 100
    flicker = torch.zeros(100)
    flicker[0] = 1.0
    assert mean_interval(flicker).low < 0 == metric_interval("temporal_error", flicker).low
    assert metric_interval("precision", torch.ones(50)).low < 1
    assert metric_interval("precision_lite", torch.zeros(50)).high > 0
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    moved = features.clone()
    moved[0] += 4  # one sample of forty, so that half of the resamplings hold it twice or not
    assert frechet_between(features, moved, 200).low == 0


def test_the_interval_of_wilson_is_known_by_its_ends() -> None:
    drawn = torch.Generator().manual_seed(3)
    for share in (0.0, 0.1, 0.5, 0.97, 1.0):
        hits = torch.rand(60, 4, generator=drawn) < share
        found = share_interval(hits)
        assert is_wilson(found.value, found.low, found.high)
    plain = mean_interval((torch.rand(90, generator=drawn) < 0.8).double())
    assert not is_wilson(plain.value, plain.low, plain.high)
    assert not is_wilson(1.0, 1.0, 1.0) and not is_wilson(0.5, None, None)


def test_every_range_is_of_a_metric() -> None:
    names = {key.removeprefix("lite_").removesuffix("_lite") for key in METRICS}
    assert {*_SHARES, *_BOUNDS} <= names | {"density"}


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
        "value": first.value,
        "low": first.low,
        "high": first.high,
        "n": 50,
    }
    monkeypatch.setattr("diffcache.eval.metrics.bootstrap.DRAWN_AT_ONCE", 170)
    assert mean_interval(values, 100).to_dict() == pytest.approx(first.to_dict(), rel=1e-12)

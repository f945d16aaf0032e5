"""Intervals of shares against Wilson's own numbers, their coverage in clusters, and ranges."""

import math

import pytest
import torch

from diffcache.eval.metrics.bootstrap import frechet_between, mean_interval
from diffcache.eval.metrics.catalog import METRICS
from diffcache.eval.metrics.intervals import (
    _BOUNDS,
    _SHARES,
    is_wilson,
    metric_interval,
    share_change,
    share_interval,
)


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


def test_one_cluster_of_equal_outcomes_is_worth_one() -> None:
    alike = outcomes(20, 64)
    one, other = share_interval(alike[:, None].expand(-1, 8)), share_interval(alike)
    assert one.high - one.low == pytest.approx(other.high - other.low, rel=0.01)


def test_clusters_as_spread_as_independent_outcomes_count_in_full() -> None:
    hits = torch.rand(4000, 4, generator=torch.Generator().manual_seed(0)) < 0.3
    one, other = share_interval(hits), share_interval(hits.flatten())
    assert one.high - one.low == pytest.approx(other.high - other.low, rel=0.03)
    assert (one.n, other.n) == (4000, 16000)
    even = torch.tensor([[0, 1]]).expand(30, 2)  # no two clusters differ
    assert share_interval(even).low == share_interval(even.flatten()).low


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


def test_shares_of_several_attributes_are_worth_more_than_one_outcome() -> None:
    right = torch.rand(256, 8, generator=torch.Generator().manual_seed(0)) < 0.9
    fractions = right.double().mean(dim=1)
    one, other = share_interval(fractions), share_interval(right)
    assert one.high - one.low == pytest.approx(other.high - other.low, rel=0.1)


def test_intervals_end_where_the_metric_does() -> None:
    near_cap = torch.full((200,), 100.0)
    near_cap[:3] = torch.tensor([99.9, 99.9, 60.0])
    assert mean_interval(near_cap).high > 100
    found = metric_interval("psnr_db", near_cap)
    assert found.low < found.value < found.high == 100
    flicker = torch.zeros(100)
    flicker[0] = 1.0
    assert mean_interval(flicker).low < 0 == metric_interval("temporal_error", flicker).low
    assert metric_interval("prompt_accuracy", torch.ones(50)).low < 1
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

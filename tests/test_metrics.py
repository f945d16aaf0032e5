"""Metrics of pictures and films, and their intervals."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from diffcache.eval.metrics.definitions import METRICS
from diffcache.eval.metrics.distances import (
    Moments,
    at_infinity,
    density_coverage,
    frechet,
    inception_score,
    kid,
    moments,
    precision_recall,
    squared_mmd,
)
from diffcache.eval.metrics.intervals import (
    _BOUNDS,
    _SHARES,
    Interval,
    frechet_between,
    frechet_change,
    frechet_interval,
    is_wilson,
    mean_interval,
    metric_interval,
    share_change,
    share_interval,
)
from diffcache.eval.metrics.pixels import both_ssim, ms_ssim, pooled_psnr, psnr, ssim, temporal_error
from tests.picture_files import normal


class PassThrough(nn.Module):
    """A feature extractor that hands on its input."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


# Fréchet


def gaussian(mean: Tensor, cov: Tensor) -> Moments:
    return Moments(mean, cov, 1000)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    a = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, -0.3], [-0.3, 3.0]], dtype=torch.float64)
    # The root of a 2 x 2 has the trace sqrt(tr + 2 sqrt(det)).
    overlap = math.sqrt(float((a @ b).trace()) + 2 * math.sqrt(float(a.det() * b.det())))
    zero = torch.zeros(2, dtype=torch.float64)
    found = frechet(gaussian(zero, a), gaussian(zero, b))
    assert found == pytest.approx(7 - 2 * overlap, rel=1e-9)
    assert found == pytest.approx(frechet(gaussian(zero, b), gaussian(zero, a)), rel=1e-9)


def test_frechet_of_equal_sets_is_nothing() -> None:
    features = normal(800, 16)
    few = moments(features[:9])  # rank below 16
    assert frechet(moments(features), moments(features)) == 0 and frechet(few, few) == 0
    shuffled = features[torch.randperm(800)]
    assert frechet(moments(features), moments(shuffled)) < 1e-9


def test_frechet_is_torchmetrics() -> None:
    fid = pytest.importorskip("torchmetrics.image.fid")
    real, fake = normal(300, 24) @ normal(24, 24, seed=1), 1.1 * normal(200, 24, seed=2) + 0.2
    theirs = fid.FrechetInceptionDistance(feature=PassThrough(24))
    theirs.update(real, real=True)
    theirs.update(fake, real=False)
    ours = frechet(moments(real), moments(fake))
    assert ours == pytest.approx(float(theirs.compute()), rel=1e-4)


def test_the_limit_for_many_samples_is_nearer_the_truth() -> None:
    reference = Moments(torch.zeros(8).double(), torch.eye(8).double(), 10**9)
    for truth, shift in ((0.0, 0.0), (0.08, 0.1)):
        features = normal(600, 8, seed=5) + shift
        plain, limit = frechet(moments(features), reference), at_infinity(features, reference)
        assert abs(limit - truth) < 0.5 * abs(plain - truth)
        # The last bits of eigenvalues depend on where the memory lies.
        assert limit == pytest.approx(at_infinity(features, reference, seed=0), abs=1e-12)


# KID, Inception Score


def test_kid_is_torchmetrics_on_the_same_subsets() -> None:
    theirs = pytest.importorskip("torchmetrics.image.kid")
    real, fake = normal(120, 10), normal(90, 10, seed=1) * 1.2 + 0.3
    assert squared_mmd(real, fake[:90]) == pytest.approx(naive_mmd(real, fake), rel=1e-9)
    same = squared_mmd(real[:40], fake[:40])
    assert same == pytest.approx(float(theirs.poly_mmd(real[:40], fake[:40])), rel=1e-4)
    metric = theirs.KernelInceptionDistance(feature=PassThrough(10), subsets=7, subset_size=45)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    torch.manual_seed(3)  # torchmetrics draws from the global generator
    mean, deviation = metric.compute()
    ours = kid(real, fake, subsets=7, subset_size=45, seed=3)
    assert ours == (pytest.approx(float(mean), rel=1e-4), pytest.approx(float(deviation), rel=1e-4))
    assert kid(real, fake, subsets=7, seed=3) == ours  # half of the smaller set by default


def naive_mmd(x: Tensor, y: Tensor) -> float:
    """Return the unbiased squared discrepancy pair by pair."""

    def kernel(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / len(a) + 1) ** 3

    def inner(s: Tensor) -> float:
        pairs = [kernel(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j]
        return sum(pairs) / len(pairs)

    cross = [kernel(a, b) for a in x for b in y]
    return inner(x) + inner(y) - 2 * sum(cross) / len(cross)


def test_inception_score_is_torchmetrics_and_has_its_limits() -> None:
    theirs = pytest.importorskip("torchmetrics.image.inception")
    logits = 3 * normal(200, 6)
    metric = theirs.InceptionScore(feature=PassThrough(6), splits=5)
    metric.update(logits)
    torch.manual_seed(4)
    expected = [float(value) for value in metric.compute()]
    ours = inception_score(logits.softmax(dim=1), splits=5, seed=4)
    assert ours == pytest.approx(expected, rel=1e-4)
    uniform = torch.full((50, 6), 1 / 6)
    balanced = torch.eye(6).repeat(25, 1)
    assert inception_score(uniform) == pytest.approx((1, 0), abs=1e-5)
    assert inception_score(balanced, splits=1) == pytest.approx((6, 0), rel=1e-6)
    assert inception_score(balanced[:1].repeat(30, 1))[0] == pytest.approx(1, abs=1e-9)


# Precision, recall, density, coverage


def means(values: tuple[Tensor, Tensor]) -> tuple[float, float]:
    first, second = values
    return float(first.mean()), float(second.mean())


def test_manifolds_of_equal_and_of_disjoint_sets() -> None:
    offset = normal(90, 512) + 50
    assert means(precision_recall(offset, offset)) == (1, 1)
    assert means(density_coverage(offset, offset)) == pytest.approx((1, 1), rel=1e-12)
    real = normal(150, 6)
    far = real + 100
    for metric in (precision_recall, density_coverage):
        assert means(metric(real, real)) == (1, 1) and means(metric(real, far)) == (0, 0)


def test_manifolds_are_their_definition_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    real, fake = normal(40, 3), normal(30, 3, seed=1) * 1.5
    monkeypatch.setattr("diffcache.eval.metrics.distances.DISTANCES_AT_ONCE", 100)
    radius = [sorted(float((a - b).norm()) for b in real)[4] for a in real]
    inside = torch.tensor([[float((a - f).norm()) < r for f in fake] for a, r in zip(real, radius, strict=True)])
    density, coverage = density_coverage(real, fake, k=4)
    assert density.tolist() == (inside.sum(dim=0) / 4).tolist()
    assert coverage.bool().tolist() == inside.any(dim=1).tolist()
    assert precision_recall(real, fake, k=4)[0].bool().tolist() == inside.any(0).tolist()


SIZES = [(64, 64), (47, 72), (100, 102), (176, 181)]  # 3, 3, 4 and 5 scales


def pair(height: int, width: int, count: int = 3, strength: float = 20) -> tuple[Tensor, Tensor]:
    """Return smooth pictures with a flat white corner, and the same with noise of growing size."""
    clean = interpolate(normal(count, 3, 8, 8), (height, width), mode="bicubic")
    clean = (clean * 60 + 128).clamp(0, 255)
    clean[..., : height // 3, : width // 3] = 255
    scale = strength * torch.arange(1, count + 1).view(-1, 1, 1, 1)
    other = clean + normal(count, 3, height, width, seed=1) * scale
    other[..., : height // 3, : width // 3] = 250
    return clean.round().to(torch.uint8), other.round().clamp(0, 255).to(torch.uint8)


def test_psnr_is_torchmetrics_per_picture_and_pooled() -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    a, b = pair(40, 56)
    x, y = a.double() / 255, b.double() / 255
    each = image.peak_signal_noise_ratio(x, y, data_range=1.0, reduction="none", dim=(1, 2, 3))
    torch.testing.assert_close(psnr(a, b), each, rtol=1e-6, atol=0)
    pooled = image.peak_signal_noise_ratio(x, y, data_range=1.0)
    assert pooled_psnr(a, b) == pytest.approx(float(pooled), rel=1e-6)
    assert pooled_psnr(a, b) < float(psnr(a, b).mean())


def test_equal_pictures_have_the_cap() -> None:
    a, b = pair(24, 24)
    assert psnr(a, a).tolist() == [100.0] * 3 and pooled_psnr(a, a) == 100.0
    assert ssim(a, a).tolist() == pytest.approx([1.0] * 3, abs=1e-12)
    assert ms_ssim(a, a).tolist() == pytest.approx([1.0] * 3, abs=1e-12)
    assert (psnr(a, b) < 100).all() and (ssim(a, b) < 1).all() and (ms_ssim(a, b) < 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_ssim_and_ms_ssim_are_torchmetrics(size: tuple[int, int]) -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    a, b = pair(*size, count=1)
    x, y = a.double() / 255, b.double() / 255
    theirs = image.structural_similarity_index_measure(x, y, data_range=1.0, reduction="none")
    torch.testing.assert_close(ssim(a, b), theirs, rtol=1e-9, atol=0)
    scales = 5 if min(size) >= 176 else 4 if min(size) >= 99 else 3
    betas = torch.tensor([0.0448, 0.2856, 0.3001, 0.2363, 0.1333][:scales], dtype=torch.float64)
    betas = betas if scales == 5 else betas / betas.sum()
    theirs = image.multiscale_structural_similarity_index_measure(
        x, y, data_range=1.0, betas=tuple(betas.tolist()), reduction="none"
    )
    torch.testing.assert_close(ms_ssim(a, b), theirs, rtol=1e-6, atol=0)
    both = both_ssim(a, b)
    assert torch.equal(both[0], ssim(a, b)) and torch.equal(both[1], ms_ssim(a, b))


def test_many_batches_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(48, 48, count=5)
    whole = [psnr(a, b), ssim(a, b), ms_ssim(a, b), temporal_error(a, b)]
    monkeypatch.setattr("diffcache.eval.metrics.pixels.VALUES_AT_ONCE", 2 * a[0].numel())
    parts = [psnr(a, b), ssim(a, b), ms_ssim(a, b), temporal_error(a, b)]
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


def test_temporal_error_sees_flicker_and_not_a_constant_offset() -> None:
    film = torch.full((6, 3, 8, 8), 100, dtype=torch.uint8)
    flicker = film + torch.tensor([0, 4] * 3, dtype=torch.uint8).view(-1, 1, 1, 1)
    assert temporal_error(film, film) == 0 and temporal_error(film, film + 7) == 0
    assert temporal_error(film, flicker) == pytest.approx(4 / 255, rel=1e-12)


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
    assert json.loads(json.dumps(first.to_dict())) == dict(value=first.value, low=first.low, high=first.high, n=50)
    monkeypatch.setattr("diffcache.eval.metrics.intervals.DRAWN_AT_ONCE", 170)
    assert mean_interval(values, 100).to_dict() == pytest.approx(first.to_dict(), rel=1e-12)

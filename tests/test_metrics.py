"""Metrics of features against torchmetrics, closed forms, limits and few-line twins."""

import math

import pytest
import torch
from torch import Tensor, nn

from diffcache.eval.metrics.distances import density_coverage, inception_score, kid, precision_recall, squared_mmd
from diffcache.eval.metrics.frechet import Moments, at_infinity, frechet, moments
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
    with pytest.raises(ValueError, match="10 samples of 8 features are too few.*need 18"):
        at_infinity(features[:10], reference)


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

"""Sets of features: the floor of a distance, and what comparing them needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffcache.eval.metrics import sets
from diffcache.eval.metrics.frechet import frechet, moments


def gaussian(count: int, seed: int, dim: int = 6) -> sets.FeatureSet:
    features = torch.randn(
        count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return sets.FeatureSet(moments(features), count, features)


@pytest.mark.parametrize(("one", "other"), [(200, 200), (100, 1000), (1000, 100)])
def test_the_floor_is_what_two_sets_of_one_distribution_are_apart(one: int, other: int) -> None:
    apart = [
        frechet(gaussian(one, 2 * seed).moments, gaussian(other, 2 * seed + 1).moments)
        for seed in range(60)
    ]
    floors = [
        sets.floor(gaussian(one, seed), gaussian(other, seed + 1), seed) for seed in range(12)
    ]
    assert np.mean(floors) == pytest.approx(np.mean(apart), rel=0.15)
    exact = sets.FeatureSet(gaussian(100_000, 5).moments, None)
    floors = [sets.floor(exact, gaussian(other, seed), seed) for seed in range(12)]
    apart = [frechet(exact.moments, gaussian(other, seed).moments) for seed in range(60)]
    assert np.mean(floors) == pytest.approx(np.mean(apart), rel=0.15)


def test_comparing_sets_needs_what_it_is_asked_for() -> None:
    known, bare = gaussian(50, 0), sets.FeatureSet(gaussian(50, 1).moments, 50)
    with pytest.raises(ValueError, match="KID, precision.* need the pictures of the reference"):
        sets.compare(bare, known, sets.Wanted(kid=True, resamples=0))
    with pytest.raises(ValueError, match="features of the second set"):
        sets.compare(known, bare, sets.Wanted())
    with pytest.raises(ValueError, match="class probabilities"):
        sets.compare(known, known, sets.Wanted(inception_score=True, resamples=0))
    assert sets.floor(gaussian(3, 0), gaussian(3, 1)) is None

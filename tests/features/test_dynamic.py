"""The dynamic programme on segments equals brute force, in its value and in its ties."""

from __future__ import annotations

import itertools

import pytest
import torch

from diffcache.features.parts.dynamic import best_starts


def brute_force(cost, count, shortest=1, longest=None, *, maximise=False):
    """Try every split; of equal ones take the smallest last start, then the last but one."""
    total = len(cost)
    longest = longest or total
    found = []
    for inner in itertools.combinations(range(1, total), count - 1):
        starts = [0, *inner]
        ends = [start - 1 for start in inner] + [total - 1]
        if all(shortest <= b - a + 1 <= longest for a, b in zip(starts, ends, strict=True)):
            value = 0.0
            for a, b in zip(starts, ends, strict=True):  # in the programme's order
                value += float(cost[a, b])
            found.append((-value if maximise else value, starts[::-1], value))
    if not found:
        return None
    _, starts, value = min(found)
    return starts[::-1], value


@pytest.mark.parametrize("maximise", [False, True])
@pytest.mark.parametrize(
    ("total", "count", "shortest", "longest"),
    [(1, 1, 1, None), (7, 3, 1, None), (9, 9, 1, None), (10, 4, 2, 3), (11, 5, 1, 4), (8, 1, 8, 8)],
)
def test_equals_brute_force(total, count, shortest, longest, maximise):
    """Every split is tried, with costs that have no structure at all."""
    for seed in range(5):
        cost = torch.randn(total, total, generator=torch.Generator().manual_seed(seed)).double()
        made = best_starts(cost, count, shortest=shortest, longest=longest, maximise=maximise)
        expected = brute_force(cost, count, shortest, longest, maximise=maximise)
        assert made[0] == expected[0]
        assert made[1] == pytest.approx(expected[1], abs=1e-12)


@pytest.mark.parametrize("maximise", [False, True])
def test_ties_take_the_smallest_starts(maximise):
    """Costs of few values tie often; whole numbers add exactly."""
    for seed in range(20):
        cost = torch.randint(0, 3, (9, 9), generator=torch.Generator().manual_seed(seed))
        for count in range(1, 10):
            assert best_starts(cost, count, maximise=maximise) == brute_force(cost, count, maximise=maximise)


def test_the_lower_triangle_is_not_read():
    """Segments run forward; nothing is asked of the others, finite or not."""
    cost = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    below = torch.full((6, 6), torch.nan).tril(-1)
    assert best_starts(cost + below, 3) == best_starts(cost, 3)

"""KVMerger: sets of neighbors, their pivots and Gaussian weights."""

from __future__ import annotations

import math

import pytest
import torch

from diffcache.kv.merging.kvmerger import ContiguousMerge
from diffcache.kv.observe import Observation
from tests.kv.merging import rows


def smooth(width: int = 24, seed: int = 5) -> Observation:
    """Return keys that change slowly from slot to slot."""
    seen = rows.layer(pads=(0, 3), width=width, seed=seed)
    seen.slots.k.copy_(seen.slots.k * 0.6 + seen.slots.k.cumsum(2))
    return seen


@pytest.mark.parametrize(("threshold", "keep"), [(-1.0, 12), (0.8, 12), (0.5, 6), (0.97, 12)])
def test_it_is_what_loops_give(threshold: float, keep: int) -> None:
    seen = smooth()
    score = rows.scores(seen)
    given = rows.plan(seen, score, keep)
    merge = ContiguousMerge(threshold, sinks=1, recent=2)
    slots, plan = merge(seen, score, given)
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            x = seen.slots.k[b, h]
            free = range(pad + 1, 22)
            links = {
                i: float(torch.cosine_similarity(x[i], x[i - 1], dim=0))
                for i in free
                if i - 1 in free
            }
            usable = [i for i in sorted(links, key=lambda i: -links[i]) if links[i] > threshold]
            closed = set(usable[: 24 - pad - keep])
            sets: list[list[int]] = []
            for i in range(pad, 24):
                if i in closed:
                    sets[-1].append(i)
                else:
                    sets.append([i])
            pivots = {max(group, key=lambda i: float(score[b, h, i])): group for group in sets}
            for pivot, group in pivots.items():
                others = [i for i in group if i != pivot]
                far = {i: float((x[i] - x[pivot]).norm()) for i in group}
                sigma = sum(far[i] for i in others) / max(len(others), 1)
                weights = {
                    i: math.exp(-(far[i] ** 2) / (2 * sigma**2)) if others else 1.0 for i in group
                }
                whole = sum(weights.values())
                for new, old in ((slots.k, seen.slots.k), (slots.v, seen.slots.v)):
                    wanted = sum(weights[i] / whole * old[b, h, i] for i in group)
                    torch.testing.assert_close(new[b, h, pivot], wanted)
            edges = {pad, 22, 23}
            worth = {p: math.inf if p in edges else float(score[b, h, p]) for p in pivots}
            wanted_kept = sorted(sorted(worth, key=lambda p: -worth[p])[:keep])
            assert (plan[b, h] >= 0).nonzero()[:, 0].tolist() == wanted_kept
    rows.check(merge, seen, score, given)


def test_equal_keys_weigh_the_same_and_count() -> None:
    seen = rows.of(torch.ones(1, 1, 5, 3, dtype=torch.float64), torch.eye(5).double()[None, None])
    plan = torch.tensor([[[0, -1, -1, -1, -1]]], dtype=torch.int8)
    score = torch.tensor([[[0.1, 0.2, 0.9, 0.3, 0.4]]])
    slots, found = ContiguousMerge(0.9, count=True)(seen, score, plan)
    assert (found >= 0).nonzero()[:, 2].tolist() == [2]  # the pivot keeps its place
    torch.testing.assert_close(slots.v[0, 0, 2], torch.full((5,), 0.2).double())
    torch.testing.assert_close(slots.meta["logn"][0, 0, 2].exp().item(), 5.0)
    again, _ = ContiguousMerge(0.9)(seen, score, plan)
    assert "logn" not in again.meta


def test_unlike_neighbors_are_dropped_rather_than_merged() -> None:
    k = torch.eye(4, dtype=torch.float64)[None, None]
    seen = rows.of(k)
    score = torch.tensor([[[0.1, 0.2, 0.4, 0.3]]])
    slots, plan = ContiguousMerge(0.5)(seen, score, rows.plan(seen, score, 2))
    assert torch.equal(slots.k, k)
    assert (plan[0, 0] >= 0).tolist() == [False, False, True, True]

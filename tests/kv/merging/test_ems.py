"""EMS: slots that go, merge or fall into the zero class, and its score."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.merging.ems import ZeroClassMerge
from diffcache.kv.score.history import GlobalLocal
from tests.kv.merging import rows


@pytest.mark.parametrize(("reach", "threshold"), [(1.0, 0.3), (2.0, -1.0), (0.5, 0.0), (0.0, 0.0)])
def test_it_is_what_loops_give(reach: float, threshold: float) -> None:
    seen = rows.layer(width=18)
    score = rows.scores(seen)
    plan = rows.plan(seen, score, 4)
    slots, same = ZeroClassMerge(reach, threshold)(seen, score, plan)
    k, v = seen.slots.k.clone(), seen.slots.v.clone()
    merged = 0
    for b in range(2):
        for h in range(2):
            valid = seen.valid.expand(plan.shape)[b, h]
            x, s = seen.slots.k[b, h], score[b, h]
            kept = [i for i in range(18) if plan[b, h, i] >= 0]
            gone = [i for i in range(18) if plan[b, h, i] < 0 and valid[i]]
            gone = sorted(gone, key=lambda i: -float(s[i]))[: int(4 * reach)]
            groups: dict[int, list[int]] = {t: [] for t in kept}
            for i in gone:
                all_of = [float(torch.cosine_similarity(x[i], x[t], dim=0)) for t in kept]
                if max(all_of) >= threshold:
                    groups[kept[all_of.index(max(all_of))]].append(i)
            for t, group in groups.items():
                merged += len(group)
                whole = sum(float(s[i]) for i in [t, *group])
                for new, old in ((k, seen.slots.k), (v, seen.slots.v)):
                    new[b, h, t] = sum(float(s[i]) / whole * old[b, h, i] for i in [t, *group])
    torch.testing.assert_close(slots.k, k, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slots.v, v, rtol=1e-6, atol=1e-6)
    assert torch.equal(same, plan)
    assert (merged > 0) == (reach > 0)
    rows.check(ZeroClassMerge(reach, threshold), seen, score, plan)


def test_scores_of_zero_or_infinity_do_no_harm() -> None:
    seen = rows.layer()
    score = torch.zeros(2, 2, 14)
    score[..., -1] = float("inf")
    slots, _ = ZeroClassMerge(3.0, -1.0)(seen, score, rows.plan(seen, rows.scores(seen), 5))
    assert slots.k.isfinite().all() and slots.v.isfinite().all()


def test_score_is_the_sum_of_shares() -> None:
    seen = rows.layer(pads=(0, 3), width=9)
    seen.queries = Query(
        torch.randn(2, 4, 3, 4, dtype=torch.float64), 6, 0.5, pos=torch.tensor([[6, 7, 8]] * 2)
    )
    drawn = torch.rand(2, 2, 9)
    asked = torch.arange(9, 0, -1.0).expand(2, 2, -1)
    seen.stats.update(mass=drawn, asked=asked)
    found = GlobalLocal(3, local=0.25)(seen)
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            k = seen.slots.k[b, h]
            near = torch.zeros(9, dtype=torch.float64)
            for g in (2 * h, 2 * h + 1):
                for j in range(3):
                    seeable = torch.arange(9)
                    logits = seen.queries.q[b, g, j] @ k.T * 0.5
                    hidden = (seeable < pad) | (seeable > 6 + j)
                    near += logits.masked_fill(hidden, float("-inf")).softmax(0)
            mean = (drawn[b, h] / asked[b, h])[pad:]
            wanted = 0.75 * mean / mean.sum() + 0.25 * (near / near.sum())[pad:]
            torch.testing.assert_close(found[b, h, pad:].double(), wanted.double())

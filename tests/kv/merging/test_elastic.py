"""Elastic Cache: buckets around anchors."""

from __future__ import annotations

import torch

from diffcache.kv.merging.elastic import BucketMerge
from tests.kv.merging import rows


def test_buckets_are_averaged_as_loops_do() -> None:
    seen = rows.layer()
    score = rows.scores(seen)
    plan = rows.plan(seen, score, 4)
    slots, same = BucketMerge()(seen, score, plan)
    for b in range(2):
        for h in range(2):
            valid = seen.valid.expand(plan.shape)[b, h]
            kept = [s for s in range(14) if plan[b, h, s] >= 0]
            buckets: dict[int, list[int]] = {t: [t] for t in kept}
            for s in range(14):
                if plan[b, h, s] < 0 and valid[s]:
                    buckets[min(kept, key=lambda t: (abs(t - s), t))].append(s)
            assert sum(len(bucket) for bucket in buckets.values()) == int(valid.sum())
            for t, bucket in buckets.items():
                for new, old in ((slots.k, seen.slots.k), (slots.v, seen.slots.v)):
                    torch.testing.assert_close(new[b, h, t], old[b, h, bucket].mean(0))
    assert torch.equal(same, plan)
    rows.check(BucketMerge(), seen, score, plan)


def test_a_row_that_loses_one_slot_only_drops_it() -> None:
    seen = rows.layer()
    plan = torch.where(seen.valid, 0, -1).to(torch.int8).repeat(1, 2, 1)
    plan[:, 0, 7] = -1
    slots, _ = BucketMerge()(seen, rows.scores(seen), plan)
    assert torch.equal(slots.k, seen.slots.k)

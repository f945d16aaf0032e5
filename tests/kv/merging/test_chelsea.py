"""Chelsea: soft matching in chunks, and centroids that count their tokens."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.attend import Query, attend
from diffcache.kv.merging.chelsea import SoftMatching
from diffcache.kv.observe import Observation
from diffcache.kv.slots import Slots
from diffcache.kv.view import View
from tests.kv.merging import rows


def reference(seen: Observation, b: int, h: int, keep: int, chunk: int, edges: set[int]) -> dict:
    """Return slot -> (key, value, tokens) of what is left of one row."""
    valid = seen.valid[b, 0]
    left = [
        (s, seen.slots.k[b, h, s].clone(), seen.slots.v[b, h, s].clone(), 1)
        for s in range(seen.slots.width)
        if valid[s]
    ]
    fixed = {s: (k, v, n) for s, k, v, n in left if s in edges}
    left = [each for each in left if each[0] not in edges]
    while len(left) + len(fixed) > keep:
        found = []
        for first in range(0, len(left), chunk):
            members = range(first, min(first + chunk, len(left)))
            b_set = members[1::2]
            for a in members[0::2]:
                if b_set:
                    near = max(
                        b_set,
                        key=lambda t: float(torch.cosine_similarity(left[a][1], left[t][1], dim=0)),
                    )
                    cos = float(torch.cosine_similarity(left[a][1], left[near][1], dim=0))
                    found.append((cos, a, near))
        if not found:
            break
        found.sort(key=lambda each: -each[0])
        found = found[: len(left) + len(fixed) - keep]
        groups: dict[int, list[int]] = {}
        for _, a, near in found:
            groups.setdefault(near, []).append(a)
        gone = {a for _, a, _ in found}
        new = []
        for i, (s, _, _, _) in enumerate(left):
            if i in gone:
                continue
            every = [left[i], *(left[a] for a in groups.get(i, []))]
            total = sum(each[3] for each in every)
            k = sum(each[1] * each[3] for each in every) / total
            v = sum(each[2] * each[3] for each in every) / total
            new.append((s, k, v, total))
        left = new
    return {**fixed, **{s: (k, v, n) for s, k, v, n in left}}


@pytest.mark.parametrize(("keep", "chunk"), [(14, 8), (6, 8), (5, 5), (10, 2), (6, 64)])
def test_it_is_what_loops_give(keep: int, chunk: int) -> None:
    seen = rows.layer(pads=(0, 3), width=24)
    score = rows.scores(seen)
    merge = SoftMatching(chunk, sinks=1, recent=2)
    given = rows.plan(seen, score, keep)
    slots, plan = merge(seen, score, given)
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            wanted = reference(seen, b, h, keep, chunk, {pad, 22, 23})
            assert (plan[b, h] >= 0).nonzero()[:, 0].tolist() == sorted(wanted)
            assert sum(n for _, _, n in wanted.values()) == 24 - pad
            for s, (k, v, n) in wanted.items():
                torch.testing.assert_close(slots.k[b, h, s], k)
                torch.testing.assert_close(slots.v[b, h, s], v)
                torch.testing.assert_close(slots.meta["logn"][b, h, s].exp().item(), float(n))
                if n == 1:
                    assert torch.equal(slots.k[b, h, s], seen.slots.k[b, h, s])
    rows.check(merge, seen, score, given)


def test_merging_twice_keeps_the_number_of_tokens() -> None:
    seen = rows.layer(pads=(0, 0), width=32)
    score = rows.scores(seen)
    merge = SoftMatching(8)
    slots, plan = merge(seen, score, rows.plan(seen, score, 20))
    pos = slots.pos.expand(plan.shape).where(plan >= 0, -1)
    order = pos.argsort(dim=-1, stable=True)
    half = Slots(slots.k, slots.v, {**slots.meta, "pos": pos}).gather(order)
    again = Observation(0, 1, half, {}, seen.tokens)
    slots, plan = merge(again, half.pos.float(), rows.plan(again, rows.scores(again), 7))
    tokens = (slots.meta["logn"].exp() * (plan >= 0)).sum(-1)
    torch.testing.assert_close(tokens, torch.full((2, 2), 32.0))
    mean = (slots.k * (slots.meta["logn"].exp() * (plan >= 0))[..., None]).sum(2) / 32
    torch.testing.assert_close(mean, seen.slots.k.mean(2), rtol=1e-5, atol=1e-6)


def test_identical_keys_merged_and_counted_attend_as_before() -> None:
    drawn = torch.Generator().manual_seed(0)
    few = torch.randn(1, 2, 3, 4, generator=drawn, dtype=torch.float64)
    k = few.repeat_interleave(4, 2)
    v = torch.randn(1, 2, 12, 5, generator=drawn, dtype=torch.float64)
    seen = rows.of(k, v)
    plan = rows.plan(seen, rows.scores(seen), 3)
    slots, plan = SoftMatching(4)(seen, rows.scores(seen), plan)
    meta = {**slots.meta, "pos": slots.pos.expand(plan.shape).where(plan >= 0, -1)}
    asked = Query(torch.randn(1, 4, 2, 4, generator=drawn, dtype=torch.float64), 12, 1.0)
    found = attend(asked, [View(Slots(slots.k, slots.v, meta))])
    wanted = attend(asked, [View(seen.slots)])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # logn is float32
    meta.pop("logn")
    uneven = {**meta, "pos": meta["pos"].where(meta["pos"] < 9, -1)}
    assert not torch.allclose(attend(asked, [View(Slots(slots.k, slots.v, uneven))]), wanted)


def test_all_protected_falls_back_to_the_latest() -> None:
    seen = rows.layer(pads=(0, 3))
    score = rows.scores(seen)
    slots, plan = SoftMatching(4, recent=12)(seen, score, rows.plan(seen, score, 5))
    assert ((plan >= 0).sum(-1) == 5).all() and (plan[..., -5:] >= 0).all()
    assert torch.equal(slots.k[..., -5:, :], seen.slots.k[..., -5:, :])

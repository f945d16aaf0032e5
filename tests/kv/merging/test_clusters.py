"""KVCrush and Chelsea: representatives by Hamming distance, and centroids that count their tokens."""

from statistics import median_low

import pytest
import torch

from diffcache.kv.merging.chelsea import SoftMatching
from diffcache.kv.merging.diversity import Diversity
from diffcache.kv.observe import Observation
from tests.kv.merging import rows


def reference(seen: Observation, b: int, h: int, keep: int, chunk: int, edges: set[int]) -> dict:
    """Return slot -> (key, value, tokens) of what is left of one row."""
    valid = seen.valid[b, 0]
    k, v = seen.slots.k[b, h].clone(), seen.slots.v[b, h].clone()
    left = [(s, k[s], v[s], 1) for s in range(seen.slots.width) if valid[s]]
    fixed = {s: (k, v, n) for s, k, v, n in left if s in edges}
    left = [each for each in left if each[0] not in edges]
    while len(left) + len(fixed) > keep:
        found = []
        for first in range(0, len(left), chunk):
            members = range(first, min(first + chunk, len(left)))
            b_set = members[1::2]
            for a in members[0::2]:
                if b_set:
                    near = max(b_set, key=lambda t: float(torch.cosine_similarity(left[a][1], left[t][1], dim=0)))
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


def test_all_protected_falls_back_to_the_latest() -> None:
    seen = rows.layer(pads=(0, 3))
    score = rows.scores(seen)
    slots, plan = SoftMatching(4, recent=12)(seen, score, rows.plan(seen, score, 5))
    assert ((plan >= 0).sum(-1) == 5).all() and (plan[..., -5:] >= 0).all()
    assert torch.equal(slots.k[..., -5:, :], seen.slots.k[..., -5:, :])


ANCHORS = ["random", "zeros", "ones", "mean", "alternating"]


def bits_of(anchor: str, size: int, left: list[list[int]]) -> list[int]:
    if anchor == "random":
        made = torch.Generator().manual_seed(0)
        return torch.randint(0, 2, (1, 1, size), generator=made).flatten().tolist()
    if anchor == "mean":
        return [int(2 * sum(bits[i] for bits in left) >= max(len(left), 1)) for i in range(size)]
    return {"zeros": [0] * size, "ones": [1] * size}.get(anchor, [i % 2 for i in range(size)])


def representatives(units: list[int], bits: dict[int, list[int]], anchor: str, want: int) -> set[int]:
    if want >= len(units):
        return set(units)
    start = bits_of(anchor, len(next(iter(bits.values()))), [bits[u] for u in units])
    ranked = sorted(units, key=lambda u: sum(a != b for a, b in zip(bits[u], start, strict=True)))
    return {ranked[j * len(units) // want] for j in range(want)}


@pytest.mark.parametrize("anchor", ANCHORS)
def test_tokens_are_what_loops_give(anchor: str) -> None:
    seen = rows.layer(heads=3, width=30)
    score = rows.scores(seen)
    plan = Diversity(0.4, anchor, sinks=1, recent=3)(  # type: ignore[arg-type]
        score, torch.full((2, 3), 12), seen
    )
    for b, pad in enumerate((0, 3)):
        inner = list(range(pad + 1, 27))
        best = [set(sorted(inner, key=lambda s: -float(score[b, h, s]))[:8]) for h in range(3)]
        bits = {s: [int(s in best[h]) for h in range(3)] for s in inner}
        ranked = sorted(inner, key=lambda s: -float(score[b, :, s].mean()))
        want = int(8 * 0.4 + 0.5)
        first = set(ranked[: 8 - want])
        left = [s for s in inner if s not in first]
        kept = first | representatives(left, bits, anchor, want) | {pad, 27, 28, 29}
        for h in range(3):
            assert set((plan[b, h] >= 0).nonzero()[:, 0].tolist()) == kept
        assert len(kept) == 12


@pytest.mark.parametrize("anchor", ANCHORS)
def test_blocks_are_what_loops_give(anchor: str) -> None:
    seen = rows.layer(width=35)
    score = rows.scores(seen)
    merge = Diversity(0.5, anchor, "official", block=4, sinks=2, recent=3)  # type: ignore[arg-type]
    plan = merge(score, torch.full((2, 2), 22), seen)
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            inner = list(range(pad + 2, 32))
            middle = median_low([float(score[b, h, s]) for s in inner])
            blocks = [inner[i : i + 4] for i in range(0, len(inner), 4)]
            bits = {
                u: [int(float(score[b, h, s]) > middle) for s in block] + [0] * (4 - len(block))
                for u, block in enumerate(blocks)
            }
            worth = [sum(float(score[b, h, s]) for s in block) for block in blocks]
            ranked = sorted(range(len(blocks)), key=lambda u: -worth[u])
            units, want = 17 // 4, 2
            first = set(ranked[: units - want])
            left = [u for u in range(len(blocks)) if u not in first]
            kept = {pad, pad + 1, 32, 33, 34}
            for u in first | representatives(left, bits, anchor, want):
                kept |= set(blocks[u])
            assert set((plan[b, h] >= 0).nonzero()[:, 0].tolist()) == kept
            assert len(kept) <= 22

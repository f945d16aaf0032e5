"""KVCrush: representatives at even steps of the Hamming distance."""

from __future__ import annotations

from statistics import median_low

import pytest
import torch

from diffcache.kv.merging.diversity import Diversity, evenly
from diffcache.kv.plan import TopK
from tests.kv.merging import rows

ANCHORS = ["random", "zeros", "ones", "mean", "alternating"]


def bits_of(anchor: str, size: int, left: list[list[int]]) -> list[int]:
    if anchor == "random":
        made = torch.Generator().manual_seed(0)
        return torch.randint(0, 2, (1, 1, size), generator=made).flatten().tolist()
    if anchor == "mean":
        return [int(2 * sum(bits[i] for bits in left) >= max(len(left), 1)) for i in range(size)]
    return {"zeros": [0] * size, "ones": [1] * size}.get(anchor, [i % 2 for i in range(size)])


def representatives(
    units: list[int], bits: dict[int, list[int]], anchor: str, want: int
) -> set[int]:
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


def test_without_a_share_it_is_top_k() -> None:
    seen = rows.layer(heads=1)
    score = rows.scores(seen)
    budget = torch.full((2, 1), 6)
    found = Diversity(0.0, sinks=1, recent=2)(score, budget, seen)
    assert torch.equal(found, TopK(1, 2)(score, budget, seen))
    blocks = Diversity(0.0, mode="official", block=1)(score, budget, seen)
    assert torch.equal(blocks, TopK()(score, budget, seen))


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("size", [1, 4, 13, 14])
def test_budgets_hold_and_rows_that_fit_are_left_alone(mode: str, size: int) -> None:
    seen = rows.layer()
    budget = torch.full((2, 2), size).minimum(seen.lengths)
    planner = Diversity(0.5, mode=mode, block=3, sinks=2, recent=3)  # type: ignore[arg-type]
    plan = planner(rows.scores(seen), budget, seen)
    count = (plan >= 0).sum(-1)
    assert (count <= budget).all() and (count >= 1).all()
    assert (count[seen.lengths <= budget] == seen.lengths[seen.lengths <= budget]).all()
    assert not (plan >= 0)[~seen.valid.expand(plan.shape)].any()


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_rows_stand_alone(mode: str) -> None:
    seen = rows.layer(width=24)
    score = rows.scores(seen)
    planner = Diversity(0.5, "mean", mode, block=3, recent=2)  # type: ignore[arg-type]
    whole = planner(score, torch.full((2, 2), 9), seen)
    for row in range(2):
        one, pad = rows.alone(seen, row)
        found = planner(score[row : row + 1, :, pad:], torch.full((1, 2), 9), one)
        assert torch.equal(found, whole[row : row + 1, :, pad:])


def test_even_steps() -> None:
    for count in range(1, 12):
        for want in range(count + 3):
            rank = torch.arange(count)
            found = evenly(rank, torch.tensor([count]), torch.tensor([want]))
            wanted = (
                {j * count // want for j in range(want)} if want <= count else set(range(count))
            )
            assert set(found.nonzero()[:, 0].tolist()) == wanted

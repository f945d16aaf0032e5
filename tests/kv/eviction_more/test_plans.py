"""Plans that keep whole windows, or drop the slot at a fixed distance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import FixedSlot, Windows
from diffcache.kv.slots import Slots

HEADS = 2


def layer(lengths: list[int], tokens: int = 0) -> Observation:
    """Return a layer whose rows hold so many slots, right-aligned."""
    width = max(lengths)
    place = torch.arange(width).expand(len(lengths), 1, -1)
    pos = (place - (width - torch.tensor(lengths))[:, None, None]).clamp_min(-1).to(torch.int32)
    empty = torch.zeros(len(lengths), HEADS, width, 2)
    seen = torch.full((len(lengths), HEADS), tokens or width)
    return Observation(0, 1, Slots(empty, empty, {"pos": pos}), {}, seen)


def drawn(seen: Observation, seed: int = 0) -> Tensor:
    shape = seen.slots.k.shape[:3]
    score = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return score.masked_fill(~seen.valid, float("-inf"))


def by_hand(plan: Windows, score: list[float], budget: int) -> list[bool]:
    """Say which slots of one row without padding are kept."""
    count = len(score)
    if budget >= count:
        return [True] * count
    if plan.recent > budget:
        return [slot >= count - budget for slot in range(count)]
    inner = max(count - plan.recent, 0)
    windows = [
        list(range(first, min(first + plan.size, inner))) for first in range(0, inner, plan.size)
    ]

    def worth(window: list[int]) -> float:
        values = sorted((score[slot] for slot in window), reverse=True)
        values = values if plan.best is None else values[: plan.best]
        return sum(values) / len(values)

    best = sorted(windows, key=worth, reverse=True)
    room = (budget - min(plan.recent, count)) // plan.size
    kept = {slot for window in best[:room] for slot in window}
    return [slot >= inner or slot in kept for slot in range(count)]


@pytest.mark.parametrize("best", [None, 1, 2])
@pytest.mark.parametrize("budget", [2, 5, 9, 14, 16, 22, 23])
def test_windows_are_kept_whole(budget: int, best: int | None) -> None:
    seen = layer([23, 16, 4])
    score, plan = drawn(seen), Windows(4, 5, best)
    budgets = torch.full((3, HEADS), budget).minimum(seen.lengths)
    keep = plan(score, budgets, seen) == 0
    for row, length in enumerate([23, 16, 4]):
        for head in range(HEADS):
            alone = score[row, head, 23 - length :].tolist()
            expected = by_hand(plan, alone, min(budget, length))
            assert keep[row, head, 23 - length :].tolist() == expected
            assert not bool(keep[row, head, : 23 - length].any())
            assert sum(expected) <= budget


def test_the_best_window_is_not_always_the_one_of_the_best_token() -> None:
    seen = layer([10])
    score = torch.tensor([0.9, 0.0, 0.0, 0.0, 0.4, 0.4, 0.4, 0.4, 0.0, 0.0]).expand(1, HEADS, -1)
    budget = torch.full((1, HEADS), 6)
    mean, peak = (Windows(4, 2, best)(score, budget, seen)[0, 0] for best in (None, 1))
    assert mean.tolist() == [-1] * 4 + [0] * 6
    assert peak.tolist() == [0] * 4 + [-1] * 4 + [0] * 2


@pytest.mark.parametrize(("distance", "gone"), [(1, 11), (4, 8), (12, 0), (25, 0)])
def test_the_slot_at_a_distance_goes(distance: int, gone: int) -> None:
    seen = layer([12], tokens=20)
    score = drawn(seen)
    plan = FixedSlot(distance, 2, 1)(score, torch.full((1, HEADS), 11), seen)
    assert plan[0].eq(-1).nonzero()[:, 1].tolist() == [gone] * HEADS


def test_a_prompt_is_planned_by_score_and_ends() -> None:
    seen = layer([12, 9])
    seen.tokens = seen.lengths
    score = drawn(seen)
    keep = FixedSlot(3, 2, 1)(score, torch.full((2, HEADS), 5), seen) == 0
    for row, pad in enumerate([0, 3]):
        assert bool(keep[row, :, [pad, pad + 1, 11]].all())
        for head in range(HEADS):
            best = score[row, head, pad + 2 : 11].argsort(descending=True)[:2] + pad + 2
            assert bool(keep[row, head, best].all()) and int(keep[row, head].sum()) == 5
    whole = FixedSlot()(score, seen.lengths, seen)
    assert bool(((whole == 0) == seen.valid).all())

"""Layer budgets and the tables they read, against brute force and closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.budget import Steady
from diffcache.kv.budgets.layers import Arithmetic, CDFLevel, LayerTable, Scheduled, prefix_counts
from diffcache.kv.learn import compresskv, epicache, prefixkv, scalekv
from diffcache.kv.observe import Observation
from diffcache.kv.slots import Slots

LAYERS, HEADS = 5, 2


def held(lengths: list[int], tokens: int | None = None, layers: int = LAYERS) -> list[Observation]:
    """Return layers whose rows hold so many slots."""
    width = max(lengths)
    pos = (
        torch.arange(width).expand(len(lengths), 1, -1)
        - (width - torch.tensor(lengths))[:, None, None]
    )
    pos = pos.clamp_min(-1).to(torch.int32)
    empty = torch.zeros(len(lengths), HEADS, width, 2)
    seen = torch.tensor(lengths) if tokens is None else torch.full((len(lengths),), tokens)
    return [
        Observation(
            index, layers, Slots(empty, empty, {"pos": pos}), {}, seen[:, None].expand(-1, HEADS)
        )
        for index in range(layers)
    ]


def drawn(seen: list[Observation], seed: int = 0, power: float = 4.0) -> list[Tensor]:
    """Return scores that fall faster in later layers, -inf in empty slots."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for each in seen:
        score = torch.rand(each.slots.k.shape[:3], generator=generator) ** (power * each.layer + 1)
        found.append(score.masked_fill(~each.valid, float("-inf")))
    return found


@pytest.mark.parametrize("size", [2, 7, 20, 33, 40, 0.1, 0.5, 0.83, 1.0])
def test_one_level_for_all_layers_holds_what_uniform_holds(size: Any) -> None:
    seen = held([40, 25])
    scores = drawn(seen)
    budgets = torch.stack(CDFLevel(size, least=0).allot(scores, seen))
    for row, tokens in enumerate([40, 25]):
        one = int(tokens * size + 1e-9) if isinstance(size, float) else size
        total = LAYERS * min(one, tokens)
        assert total - LAYERS <= int(budgets[:, row, 0].sum()) <= total
        assert torch.equal(budgets[:, row, 0], budgets[:, row, 1])
        assert bool((budgets[:, row] <= tokens).all())
    if size == 40 or (isinstance(size, float) and size == 1.0):
        assert bool((budgets[:, 0] == 40).all()) and bool((budgets[:, 1] == 25).all())


def test_the_level_is_the_same_in_all_layers() -> None:
    seen = held([40])
    scores = drawn(seen)
    counts = torch.stack(CDFLevel(10, least=0).allot(scores, seen))[:, 0, 0].tolist()
    below, above = [], []
    for score, count in zip(scores, counts, strict=True):
        mass = score.mean(1)[0].double().sort(descending=True).values
        share = mass.cumsum(0) / mass.sum()
        below.append(float(share[count - 1]) if count else 0.0)
        above.append(float(share[count]) if count < 40 else 1.0)
    assert max(below) < min(above)  # some level lies between: every prefix is the smallest
    assert counts == sorted(counts, reverse=True) and counts[0] > 2 * counts[-1]


def test_counts_rise_with_the_total() -> None:
    seen = held([30, 30])
    scores = torch.stack([score.mean(1) for score in drawn(seen)])
    slots = torch.full((LAYERS, 2), 30)
    before = torch.zeros(LAYERS, 2, dtype=torch.long)
    for total in range(0, LAYERS * 30 + 1, 5):
        counts = prefix_counts(scores, slots, torch.tensor([total, total]))
        assert bool((counts >= before).all())
        before = counts
    assert bool((before == 30).all())


def test_slots_that_always_stay_come_first_and_zeros_last() -> None:
    seen = held([12], layers=2)
    always = torch.zeros(1, HEADS, 12)
    always[..., -4:] = float("inf")
    always[..., 0] = 1.0
    flat = torch.ones(1, HEADS, 12)
    low, high = CDFLevel(6).allot([always, flat], seen)
    assert int(low[0, 0]) >= 4 and 11 <= int(low[0, 0] + high[0, 0]) <= 12
    full = CDFLevel(12).allot([always, flat], seen)
    assert bool((torch.stack(full) == 12).all())


@pytest.mark.parametrize("size", [3, 10, 24, 0.25, 1.0])
@pytest.mark.parametrize("weights", [(), (5.0, 3.0, 1.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0, 0.0)])
def test_tables_share_out_every_slot(size: Any, weights: Any) -> None:
    seen = held([40, 24])
    budgets = torch.stack(LayerTable(size, weights).allot(drawn(seen), seen))
    for row, tokens in enumerate([40, 24]):
        one = int(tokens * size + 1e-9) if isinstance(size, float) else size
        assert int(budgets[:, row, 0].sum()) == LAYERS * min(one, tokens)
        assert bool((budgets[:, row] <= tokens).all()) and bool((budgets[:, row] >= 1).all())


def test_tables_are_proportions() -> None:
    seen = held([100])
    budgets = torch.stack(LayerTable(20, (4, 3, 2, 1, 0), least=0).allot(drawn(seen), seen))
    assert budgets[:, 0, 0].tolist() == [40, 30, 20, 10, 0]
    least = torch.stack(LayerTable(20, (4, 3, 2, 1, 0), least=5).allot(drawn(seen), seen))
    assert int(least.amin()) == 5 and int(least[:, 0, 0].sum()) == 100
    with pytest.raises(ValueError, match="weights of 2 layers"):
        LayerTable(20, (1.0, 2.0)).allot(drawn(seen), seen)


def test_groups_fall_by_equal_steps() -> None:
    seen = held([100], layers=6)
    budgets = torch.stack(Arithmetic(40, group=2, beta=2.0).allot([], seen))[:, 0, 0].tolist()
    assert budgets == [60, 60, 40, 40, 20, 20]
    flat = torch.stack(Arithmetic(40, group=2, beta=1.0).allot([], seen))
    assert bool((flat == 40).all())
    assert bool((torch.stack(Arithmetic(100, 2, 5.0).allot([], seen)) == 100).all())
    assert bool((torch.stack(Arithmetic(1.0, 4, 5.0).allot([], seen)) == 100).all())


def test_the_scale_decides() -> None:
    budget = Scheduled(50, (4, 9), ((3, 5), (2, 4)), prompt=2)
    for tokens, expected in ((5, [3, 2]), (6, [3, 2]), (7, [5, 4]), (15, [5, 4])):
        found = budget.allot([], held([tokens], layers=2))
        assert [int(each[0, 0]) for each in found] == expected
    assert int(Scheduled(7, (4, 9)).allot([], held([13], layers=1))[0][0, 0]) == 7
    with pytest.raises(ValueError, match="table of 2 layers"):
        budget.allot([], held([5], layers=3))


def test_steady_budgets_lose_one_slot_once_some_are_gone() -> None:
    budget = Steady(LayerTable(6))
    assert int(budget.allot([], held([10]))[0][0, 0]) == 6
    assert int(budget.allot([], held([7], tokens=11))[0][0, 0]) == 6
    assert budget.size == 6


def test_shares_are_averaged_over_samples() -> None:
    seen = held([50])
    samples = [drawn(seen, seed) for seed in range(3)]
    shares = prefixkv.layer_shares(samples, 0.2)
    one = [prefixkv.layer_shares([sample], 0.2) for sample in samples]
    assert sum(shares) == pytest.approx(LAYERS * 0.2, abs=LAYERS / 50)
    assert shares == pytest.approx([sum(row) / 3 for row in zip(*one, strict=True)])
    online = torch.stack(CDFLevel(0.2).allot(samples[0], seen))[:, 0, 0]
    assert one[0] == pytest.approx((online / 50).tolist())


def test_retrieval_heads_look_at_the_whole_answer() -> None:
    probs = torch.zeros(3, 2, 10)
    probs[0, 0, 4], probs[0, 1, 5] = 1.0, 1.0  # the tokens that are said
    probs[1, :, 3:6] = 1 / 3  # and what is around them
    probs[2, :, 9] = 1.0
    scores = compresskv.retrieval_score(probs, 3, 6)
    torch.testing.assert_close(scores, torch.tensor([1.0, 1.0, 0.0]))
    table = torch.stack([scores, scores.flip(0)])
    assert compresskv.top_heads(table, 2) == ((0, 1), (1, 2))


def test_layers_get_slots_by_their_error() -> None:
    full = torch.tensor([[3.0, 4.0]])
    assert compresskv.eviction_error(full, full) == 0
    assert compresskv.eviction_error(full, torch.zeros(1, 2)) == pytest.approx(1.0)
    assert compresskv.eviction_error(full, torch.tensor([[3.0, 1.0]])) == pytest.approx(0.6)
    weights = compresskv.layer_weights([[1.0, 3.0], [3.0, 5.0]])
    assert weights == pytest.approx((2 / 6, 4 / 6))


def test_sensitivity_is_how_far_keys_turn() -> None:
    keys = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    other = keys.clone()
    other[:, :, :3] *= -1  # half of the keys turn around
    found = epicache.sensitivity([keys, keys], [keys * 2, other])
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0]).double(), atol=1e-7, rtol=0)
    even = epicache.layer_weights(torch.tensor([1.0, 4.0]), 0.0)
    assert even == pytest.approx((0.5, 0.5))
    assert epicache.layer_weights(torch.tensor([1.0, 4.0]), 0.5) == pytest.approx((1 / 3, 2 / 3))


def test_refiners_save_for_drafters() -> None:
    index = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.8, 0.8], [0.7, 0.95]])
    table = torch.tensor(scalekv.capacities(index, 100, drafters=1, reduction=0.5))
    assert table[:, 0].tolist() == [175, 75, 75, 75]
    assert table[:, 1].tolist() == [50, 250, 50, 50]
    assert bool((table.sum(0) == 400).all())
    assert set(sum(scalekv.capacities(index, 7, drafters=0), ())) == {7}
    assert Scheduled(2, (3, 4), scalekv.capacities(index, 9, drafters=2)).table


def test_selectivity_is_attention_on_the_map_and_on_few_slots() -> None:
    even = torch.full((2, 10), 0.1)
    assert float(scalekv.selectivity(even, 2, best=3)) == pytest.approx(0.5)
    here = torch.zeros(1, 10)
    here[:, -1] = 1.0
    few = torch.zeros(1, 10)
    few[:, 0] = 1.0
    for probs in (here, few):
        assert float(scalekv.selectivity(probs, 2, best=1)) == pytest.approx(1.0)

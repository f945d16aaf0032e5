"""Budgets: exact totals, bounds, closed forms, tables, and the slots that kvpress keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.budget import Uniform
from diffcache.kv.budgets import layers as budgets
from diffcache.kv.budgets.heads import AdaHead, HeadTable
from diffcache.kv.budgets.layers import Arithmetic, CDFLevel, EntropyVariance, LayerTable, Pyramid, Scheduled
from diffcache.kv.learn import compresskv, epicache, prefixkv, scalekv
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK, TwoStage
from tests.kv.eviction.seen import golden_kept, golden_score, held, observed, stored
from tests.kv.kvpress_golden import LAYERS


def layers(count: int, tokens: int, *, heads: int = 2, pad: int = 0, q: bool = False) -> Any:
    """Return observations of random layers of one row."""
    found = []
    for layer in range(count):
        k = torch.randn(1, heads, tokens, 8)
        asked = torch.randn(1, 2 * heads, tokens, 8) * (1 + layer) if q else None
        found.append(observed(k, k, asked, pad=pad, layer=layer, layers=count))
    return found


def totals(budgets: list[Tensor]) -> int:
    return int(torch.stack(budgets).sum())


def test_apportion_keeps_total_and_bounds_and_follows_weights() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        weights = torch.rand(6, 50, generator=generator) ** 3
        low = torch.randint(0, 5, (6, 50), generator=generator)
        high = low + torch.randint(0, 60, (6, 50), generator=generator)
        total = torch.randint(0, 300, (50,), generator=generator)
        found = budgets.apportion(weights, total, low, high)
        wanted = total.maximum(low.sum(0)).minimum(high.sum(0))
        assert torch.equal(found.sum(0), wanted)
        assert (found >= low).all() and (found <= high).all()
        free = (found > low) & (found < high)
        rate = (found / weights).where(free, torch.nan)
        for column in range(50):  # one factor for all that no bound holds
            w, n = weights[:, column][free[:, column]], found[:, column][free[:, column]]
            if len(w) > 1:
                assert ((n - 1) / w).max() <= ((n + 1) / w).min() + 1e-6, rate[:, column]
    none = torch.zeros(3, dtype=torch.int64)
    assert budgets.apportion(none.float(), torch.tensor(8), none, none + 9).tolist() == [3, 3, 2]


def test_pyramid_is_an_arithmetic_sequence() -> None:
    seen = layers(5, 400)
    found = [int(each[0, 0]) for each in Pyramid(68, beta=4, window=8).allot([], seen)]
    # Beyond the window of 8 the mean is 60: the last layer gets 60 / 4, the first 2 * 60 - 15.
    assert found in ([113, 90, 68, 46, 23], [113, 91, 68, 45, 23]) and sum(found) == 5 * 68
    assert {int(each[0, 0]) for each in Pyramid(68, 1.0).allot([], seen)} == {68}


@pytest.mark.parametrize("size", [0.1, 0.8, 1.0, 33, 90])
@pytest.mark.parametrize("beta", [1.0, 20.0])
def test_pyramid_falls_and_keeps_its_total(size: Any, beta: float) -> None:
    seen = layers(4, 64, pad=7)
    budgets = Pyramid(size, beta).allot([], seen)
    mean = int(Uniform(size).allot([], seen[:1])[0][0, 0])
    assert totals(budgets) == 4 * 2 * mean
    rows = torch.stack(budgets)[:, 0, 0].tolist()
    assert rows == sorted(rows, reverse=True) and rows[0] <= 64
    assert rows[-1] >= min(8, mean)
    assert size != 1.0 or rows == [64] * 4


@pytest.mark.parametrize("size", [0.1, 0.5, 1.0, 4, 40, 500])
def test_cake_keeps_its_total_and_equal_layers_get_the_same(size: Any) -> None:
    torch.manual_seed(1)
    seen = layers(4, 100, pad=3, q=True)
    budget = EntropyVariance(size, window=8)
    mean = int(Uniform(size).allot([], seen[:1])[0][0, 0])
    assert totals(budget.allot([], seen)) == 4 * 2 * mean
    same = budget.allot([], [seen[0]] * 4)
    assert {int(n) for each in same for n in each.flatten()} == {mean}


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("percent", [50, 75])
@pytest.mark.parametrize("name", ["adakv_snapkv", "critical_adakv_snapkv"])
def test_ada_heads_keep_what_kvpress_keeps(name: str, percent: int, layer: int) -> None:
    seen = stored(layer)
    score = golden_score("snapkv")[layer]  # with a finite window, as theirs
    wanted = golden_kept(name, percent)[layer]
    size = int(wanted.sum(-1).sum(-1)[0]) // 2
    budget = AdaHead(Uniform(size), 0.2).allot([score], [seen])[0]
    plan = TwoStage() if name.startswith("critical") else TopK()
    kept = plan(score, budget, seen) == 0
    assert torch.equal(budget, wanted.sum(-1))
    assert torch.equal(kept, wanted)


def test_head_table() -> None:
    seen = layers(2, 100)
    table = ((True, False), (False, False))
    assert [each.tolist() for each in HeadTable(table, 16).allot([], seen)] == [[[100, 16]], [[16, 16]]]
    few = HeadTable(table, 0.2, least=10, more=3).allot([], seen)
    assert few[1].tolist() == [[23, 23]]
    assert HeadTable(table, 0.2, least=40, more=3).allot([], seen)[0].tolist() == [[100, 43]]
    assert HeadTable(table, 500).allot([], seen)[1].tolist() == [[100, 100]]


DEPTH = 5


def drawn(seen: list[Observation], seed: int = 0, power: float = 4.0) -> list[Tensor]:
    """Return scores that fall faster in later layers, -inf in empty slots."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for each in seen:
        score = torch.rand(each.slots.k.shape[:3], generator=generator) ** (power * each.layer + 1)
        found.append(score.masked_fill(~each.valid, float("-inf")))
    return found


@pytest.mark.parametrize("size", [2, 20, 40, 0.1, 0.83])
def test_one_level_for_all_layers_holds_what_uniform_holds(size: Any) -> None:
    seen = held([40, 25], layers=DEPTH)
    scores = drawn(seen)
    budgets = torch.stack(CDFLevel(size, least=0).allot(scores, seen))
    for row, tokens in enumerate([40, 25]):
        one = int(tokens * size + 1e-9) if isinstance(size, float) else size
        total = DEPTH * min(one, tokens)
        assert total - DEPTH <= int(budgets[:, row, 0].sum()) <= total
        assert torch.equal(budgets[:, row, 0], budgets[:, row, 1])
        assert bool((budgets[:, row] <= tokens).all())
    if size == 40 or (isinstance(size, float) and size == 1.0):
        assert bool((budgets[:, 0] == 40).all()) and bool((budgets[:, 1] == 25).all())


@pytest.mark.parametrize("size", [3, 24, 0.25])
@pytest.mark.parametrize("weights", [(), (5.0, 3.0, 1.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0, 0.0)])
def test_tables_share_out_every_slot(size: Any, weights: Any) -> None:
    seen = held([40, 24], layers=DEPTH)
    budgets = torch.stack(LayerTable(size, weights).allot(drawn(seen), seen))
    for row, tokens in enumerate([40, 24]):
        one = int(tokens * size + 1e-9) if isinstance(size, float) else size
        assert int(budgets[:, row, 0].sum()) == DEPTH * min(one, tokens)
        assert bool((budgets[:, row] <= tokens).all()) and bool((budgets[:, row] >= 1).all())


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


def test_shares_are_averaged_over_samples() -> None:
    seen = held([50], layers=DEPTH)
    samples = [drawn(seen, seed) for seed in range(3)]
    shares = prefixkv.layer_shares(samples, 0.2)
    one = [prefixkv.layer_shares([sample], 0.2) for sample in samples]
    assert sum(shares) == pytest.approx(DEPTH * 0.2, abs=DEPTH / 50)
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

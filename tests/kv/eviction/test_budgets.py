"""Budgets: exact totals, bounds, closed forms, and the slots that kvpress keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.budget import Budget, Uniform
from diffcache.kv.budgets.heads import AdaHead, HeadTable
from diffcache.kv.budgets.layers import EntropyVariance, Pyramid, apportion
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK, TwoStage
from tests.kv.eviction.seen import golden_kept, golden_score, observed, stored
from tests.kv.kvpress_presses import LAYERS


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
        found = apportion(weights, total, low, high)
        wanted = total.maximum(low.sum(0)).minimum(high.sum(0))
        assert torch.equal(found.sum(0), wanted)
        assert (found >= low).all() and (found <= high).all()
        free = (found > low) & (found < high)
        rate = (found / weights).where(free, torch.nan)
        for column in range(50):  # one factor for all that no bound holds
            w, n = weights[:, column][free[:, column]], found[:, column][free[:, column]]
            if len(w) > 1:
                assert ((n - 1) / w).max() <= ((n + 1) / w).min() + 1e-6, rate[:, column]


def test_apportion_by_hand() -> None:
    def share(weights: list[float], total: int, high: int = 100) -> list[int]:
        count = len(weights)
        bounds = torch.zeros(count, dtype=torch.int64), torch.full((count,), high)
        return apportion(torch.tensor(weights), torch.tensor(total), *bounds).tolist()

    assert share([3, 2, 1], 12) == [6, 4, 2]
    assert share([1, 1, 1], 8) == [3, 3, 2]
    assert share([0, 0, 0], 9) == [3, 3, 3]
    assert share([8, 1, 1], 12, high=6) == [6, 3, 3]
    assert share([1, 0, 0], 12, high=6) == [6, 3, 3]
    assert share([1, 2, 3], 400) == [100, 100, 100]


def test_pyramid_is_an_arithmetic_sequence() -> None:
    seen = layers(5, 400)
    found = [int(each[0, 0]) for each in Pyramid(68, beta=4, window=8).allot([], seen)]
    # Beyond the window of 8 the mean is 60: the last layer gets 60 / 4, the first 2 * 60 - 15.
    assert found == [113, 90, 68, 46, 23] or found == [113, 91, 68, 45, 23]
    assert sum(found) == 5 * 68
    assert {int(each[0, 0]) for each in Pyramid(68, 1.0).allot([], seen)} == {68}


def test_a_short_prompt_makes_the_pyramid_flatter() -> None:
    seen = layers(3, 100)
    # 2 * 60 - 60 / 20 would be more than the 92 that there are beyond the window.
    found = [int(each[0, 0]) for each in Pyramid(68, beta=20).allot([], seen)]
    assert found == [100, 68, 36]


@pytest.mark.parametrize("size", [0.1, 0.37, 0.8, 1.0, 16, 33, 90])
@pytest.mark.parametrize("beta", [1.0, 3.0, 20.0])
def test_pyramid_falls_and_keeps_its_total(size: Any, beta: float) -> None:
    seen = layers(4, 64, pad=7)
    budgets = Pyramid(size, beta).allot([], seen)
    mean = int(Uniform(size).allot([], seen[:1])[0][0, 0])
    assert totals(budgets) == 4 * 2 * mean
    rows = torch.stack(budgets)[:, 0, 0].tolist()
    assert rows == sorted(rows, reverse=True) and rows[0] <= 64
    assert rows[-1] >= min(8, mean)
    assert size != 1.0 or rows == [64] * 4


def test_cake_shares_by_entropy_and_variance() -> None:
    seen = layers(3, 200, q=True)
    budget = EntropyVariance(60, window=8, tau1=2.0, tau2=0.5)
    wanted = []
    for each in seen:
        probs = each.probs(8)[..., :192].double()
        entropy = -(probs * probs.clamp_min(1e-300).log()).sum()
        wanted.append(float(entropy**0.5 * probs.var(3).sum() ** 2))
    rows = torch.stack(budget.allot([], seen))[:, 0, 0]
    assert int(rows.sum()) == 180 and (rows >= 8).all()
    torch.testing.assert_close(budget.preference(seen[1]).item(), wanted[1], rtol=1e-6, atol=0)
    for slots, share in zip(rows.tolist(), wanted, strict=True):
        assert 0 <= slots - 8 - 156 * share / sum(wanted) + 1 <= 2


@pytest.mark.parametrize("size", [0.1, 0.5, 1.0, 4, 40, 500])
def test_cake_keeps_its_total_and_equal_layers_get_the_same(size: Any) -> None:
    torch.manual_seed(1)
    seen = layers(4, 100, pad=3, q=True)
    budget = EntropyVariance(size, window=8)
    mean = int(Uniform(size).allot([], seen[:1])[0][0, 0])
    assert totals(budget.allot([], seen)) == 4 * 2 * mean
    same = budget.allot([], [seen[0]] * 4)
    assert {int(n) for each in same for n in each.flatten()} == {mean}


def test_cake_is_the_same_whatever_padding() -> None:
    one = [EntropyVariance(20, 8).preference(stored(layer)) for layer in range(LAYERS)]
    two = [EntropyVariance(20, 8).preference(stored(layer, pad=11)) for layer in range(LAYERS)]
    torch.testing.assert_close(torch.stack(one), torch.stack(two), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [0.1, 0.45, 1.0, 7])
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.9, 1.0])
def test_ada_heads_sum_to_the_budget_and_keep_a_floor(size: Any, floor: float) -> None:
    seen = layers(2, 60, heads=4, pad=5)
    scores = [
        (torch.rand(1, 4, 65) ** (1 + torch.arange(4.0)[:, None])).masked_fill(
            ~each.valid, float("-inf")
        )
        for each in seen
    ]
    base = Uniform(size).allot(scores, seen)
    for before, after in zip(base, AdaHead(Uniform(size), floor).allot(scores, seen), strict=True):
        assert after.sum() == before.sum()
        assert (after >= (before * floor).floor().clamp_min(1)).all() and (after <= 60).all()
        if floor == 0.2 and size == 0.45:
            assert after[0, 0] > before[0, 0] > after[0, 3]  # the heads' scores do differ
        if floor == 1.0:
            assert torch.equal(after, before)


@pytest.mark.parametrize("size", [0.1, 0.45, 7])
def test_ada_heads_with_equal_scores_are_uniform(size: Any) -> None:
    (seen,) = layers(1, 60, heads=4)
    for score in (torch.rand(1, 1, 60), torch.zeros(1, 1, 60)):
        scores = [score.expand(1, 4, 60)]
        base = Uniform(size).allot(scores, [seen])[0]
        assert torch.equal(AdaHead(Uniform(size)).allot(scores, [seen])[0], base)


def test_ada_heads_take_the_highest_scores_of_all() -> None:
    (seen,) = layers(1, 50, heads=3)
    score = torch.rand(1, 3, 50)
    budget = AdaHead(Uniform(10), floor=0.0).allot([score], [seen])[0]
    best = score.flatten().argsort(descending=True)[:30] // 50
    best = torch.bincount(best, minlength=3)
    assert best.min() >= 1  # so that the single slot every head keeps is among them
    assert torch.equal(budget[0], best)
    score[:, 2] -= 10
    assert AdaHead(Uniform(10), floor=0.0).allot([score], [seen])[0][0, 2] == 1


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
    assert [each.tolist() for each in HeadTable(table, 16).allot([], seen)] == [
        [[100, 16]], [[16, 16]],
    ]  # fmt: skip
    few = HeadTable(table, 0.2, least=10, more=3).allot([], seen)
    assert few[1].tolist() == [[23, 23]]
    assert HeadTable(table, 0.2, least=40, more=3).allot([], seen)[0].tolist() == [[100, 43]]
    assert HeadTable(table, 500).allot([], seen)[1].tolist() == [[100, 100]]
    with pytest.raises(ValueError, match="2 layers with 2 heads, and this model has 3 with 2"):
        HeadTable(table, 16).allot([], layers(3, 10))


@dataclass(frozen=True)
class Steps(Budget):
    """Another number of slots for each head."""

    size: int = 4

    def allot(self, scores: Any, seen: list[Observation]) -> list[Tensor]:
        return [(torch.arange(4) * 5 + self.size).expand(1, 4) for _ in seen]


def test_budgets_compose() -> None:
    seen = layers(3, 60, heads=4)
    scores = [torch.rand(1, 4, 60) for _ in seen]
    assert totals(AdaHead(Steps()).allot(scores, seen)) == 3 * (4 + 9 + 14 + 19)
    pyramid = Pyramid(20, 4.0)
    shared = AdaHead(pyramid).allot(scores, seen)
    for one, two in zip(pyramid.allot(scores, seen), shared, strict=True):
        assert one.sum() == two.sum() and not torch.equal(one, two)
    assert eval(repr(AdaHead(pyramid))) == AdaHead(pyramid)

"""Scores are those of kvpress, whatever padding stands before a row, and settings are checked."""

import pytest
import torch

from diffcache.kv.attend import probabilities
from diffcache.kv.budgets.layers import EntropyVariance
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK, TwoStage
from diffcache.kv.score.attention import LastQuery, Mass, Window, WindowVariance
from diffcache.kv.score.base import Score
from diffcache.kv.score.expected_attention import Expected
from diffcache.kv.score.recency import Chance, Recency
from diffcache.kv.score.vectors import KeyDifference, KeyNorm, projected_norm
from tests.kv.eviction.seen import golden_kept, golden_score, observed, stored
from tests.kv.kvpress_golden import GROUPS, HEADS, LAYERS, SIZE, TOKENS, golden

FREE: dict[str, tuple[Score, int]] = {  # name in the file, scorer, slots that we always keep
    "knorm": (KeyNorm(), 0),
    "keydiff": (KeyDifference(), 0),
    "snapkv": (Window(8, 5), 8),
    "tova": (LastQuery(), 1),
}


def everything(layer: int, score: Mass, pad: int = 0) -> Observation:
    """Return a layer of the file with the statistics of all its queries."""
    seen = stored(layer, window=TOKENS, pad=pad)
    shape = seen.slots.k.shape[:3]
    seen.stats = {name: torch.zeros(shape) for name in score.statistics}
    for part, found, probs in probabilities(seen.asked, seen.slots, 32):
        score.track(seen.stats, part, found, probs)
    return seen


@pytest.mark.parametrize("layer", range(LAYERS))
def test_scores_are_those_of_kvpress(layer: int) -> None:
    for name, (score, always) in FREE.items():
        found, wanted = score(stored(layer)), golden_score(name)[layer]
        earlier = slice(0, TOKENS - always)
        torch.testing.assert_close(found[..., earlier], wanted[..., earlier], rtol=2e-5, atol=1e-7, msg=name)
        assert found[..., TOKENS - always :].isposinf().all()
    found = Mass(mean=True)(everything(layer, Mass(mean=True)))
    torch.testing.assert_close(found, golden_score("observed_attention")[layer], rtol=2e-5, atol=0)


def test_mass_is_the_column_sum_and_padding_adds_nothing() -> None:
    seen = stored(0, window=TOKENS)
    q = seen.asked.q.view(-1, HEADS, GROUPS, TOKENS, SIZE).double()
    found = q @ seen.slots.k[:, :, None].double().mT / SIZE**0.5
    late = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    wanted = found.masked_fill(late, float("-inf")).softmax(-1).sum(3).mean(2)
    for mean in (False, True):
        alone = Mass(mean)(everything(0, Mass(mean)))
        padded = Mass(mean)(everything(0, Mass(mean), pad=9))
        torch.testing.assert_close(padded[..., 9:], alone)
        if not mean:
            torch.testing.assert_close(alone.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("percent", [50, 75])
def test_streaming_and_two_stages_keep_what_kvpress_keeps(layer: int, percent: int) -> None:
    """Its window can lose to large values in the second stage; ours stays, so only others count."""
    seen, wanted = stored(layer), golden_kept("streaming_llm", percent)[layer]
    assert torch.equal(TopK(sinks=4)(Recency()(seen), wanted.sum(-1), seen) == 0, wanted)
    window = golden_score("snapkv")[layer]  # the same finite window as theirs
    wanted = golden_kept("critical_snapkv", percent)[layer]
    assert torch.equal(TwoStage()(window, wanted.sum(-1), seen) == 0, wanted)


def test_the_first_stage_has_at_least_one_slot_and_infinite_scores_stay() -> None:
    k = torch.zeros(1, 1, 4, 1)
    v = torch.tensor([0.0, 5.0, 9.0, 0.0]).view(1, 1, 4, 1)
    seen = observed(k, v, out=torch.ones(1, 1))
    score = torch.tensor([[[0.9, 0.2, 0.1, 0.0]]])
    one, two = (TwoStage()(score, torch.tensor([[n]]), seen)[0, 0] for n in (1, 2))
    assert one.tolist() == [0, -1, -1, -1]  # the highest score, though its value is nothing
    assert two.tolist() == [0, 0, -1, -1]  # then the largest product
    score[..., 3] = float("inf")
    assert TwoStage(first=0.0)(score, torch.tensor([[1]]), seen)[0, 0].tolist() == [-1, -1, -1, 0]
    padded = observed(k, v, pad=2, out=torch.ones(1, 1))
    padded.slots.v[:, :, :2] = 0  # as the flat layout fills rows up
    wide = torch.nn.functional.pad(score, (2, 0), value=float("-inf"))
    plan = TwoStage()(wide, torch.tensor([[3]]), padded)[0, 0]
    assert plan.tolist() == [-1, -1, -1, 0, 0, 0]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", ["expected_attention", "expected_attention_mean"])
def test_expected_attention_is_that_of_kvpress(name: str, layer: int) -> None:
    both = name == "expected_attention"
    score = Expected(TOKENS, 512, 4, both, both, 0.02 if both else 0.0)
    for pad in (0, 9):
        found = score(stored(layer, window=TOKENS, pad=pad))[..., pad:]
        assert found[..., :4].isposinf().all()
        wanted = golden_score(name)[layer][..., 4:]
        torch.testing.assert_close(found[..., 4:], wanted, rtol=1e-4, atol=1e-7)


def test_projected_norm_is_that_of_each_heads_own_columns() -> None:
    seen = stored(1)
    v, wo = seen.slots.v.double(), golden()[0]["wo"][1].double()
    wanted = torch.zeros(v.shape[:3], dtype=torch.float64)
    for head in range(HEADS * GROUPS):
        columns = wo[:, head * SIZE : (head + 1) * SIZE]
        wanted[:, head // GROUPS] += (v[:, head // GROUPS] @ columns.T).abs().sum(-1) / GROUPS
    torch.testing.assert_close(projected_norm(seen).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_row_with_fewer_tokens_than_the_window_keeps_all_of_it() -> None:
    k, v, q = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 2, 3, 4)
    for score in (Window(8), WindowVariance(8)):
        assert score(observed(k, v, q, pad=2)).isposinf().all()
    assert EntropyVariance(4, 8).preference(observed(k, v, q)).tolist() == [0.0]


def test_chance_is_even_and_differs_by_seed_layer_and_head() -> None:
    k = torch.zeros(1, 4, 5000, 1)
    one, two = (Chance(seed)(observed(k, k)) for seed in (0, 1))
    other = Chance(0)(observed(k, k, layer=1))
    assert one.min() >= 0 and one.max() <= 1
    assert abs(float(one.mean()) - 0.5) < 0.02
    assert (torch.histc(one, 10) - 2000).abs().max() < 200
    columns = [one[0, 0], one[0, 1], one[0, 2], one[0, 3], two[0, 0], other[0, 0], one[0, 0].roll(1)]
    off = torch.corrcoef(torch.stack(columns)).fill_diagonal_(0)
    assert off.abs().max() < 0.06
    shorter = Chance(0)(observed(k[:, :, :3000], k[:, :, :3000], pad=7))
    assert torch.equal(one[..., :3000], shorter[..., 7:])  # whatever comes later, or stands before

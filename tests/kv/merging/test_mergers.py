"""Mergers: matches of slots, buckets, zero classes, neighbors and text before images; nothing is lost or made."""

import math

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.merging.absorb import Match, by_position, parted
from diffcache.kv.merging.ems import ZeroClassMerge
from diffcache.kv.merging.kvmerger import ContiguousMerge
from diffcache.kv.merging.look_m import AllText, TextFirst
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.score.attention import Mass, Window
from diffcache.kv.score.base import Score
from diffcache.kv.score.history import GlobalLocal
from diffcache.kv.score.learned import Retained, RetainingHeads
from diffcache.kv.score.recency import Recency
from diffcache.kv.slots import Slots
from tests.kv.merging import rows


def pairs(match: Match, b: int, h: int) -> dict[int, int]:
    there = match.found[b, h]
    return dict(zip(match.source[b, h][there].tolist(), match.target[b, h][there].tolist(), strict=True))


def test_position_finds_the_nearest_and_of_two_the_earlier() -> None:
    seen = rows.layer(pads=(0, 2), width=12)
    seen.slots.meta["pos"][0, 0] = torch.tensor([0, 1, 2, 3, 4, 5, 9, 10, 11, 20, 21, 22])
    plan = torch.full((2, 2, 12), -1, dtype=torch.int8)
    plan[:, :, [2, 6, 10]] = 0
    goes, stays = parted(seen.slots, plan)
    match = by_position(seen.slots.pos, goes, stays)
    # Position 5 is 3 from 2 and 4 from 9; 11 is 2 from 9; 20 is 1 from 21.
    assert pairs(match, 0, 0) == {0: 2, 1: 2, 3: 2, 4: 2, 5: 2, 7: 6, 8: 6, 9: 10, 11: 10}
    assert pairs(match, 1, 1) == {3: 2, 4: 2, 5: 6, 7: 6, 8: 6, 9: 10, 11: 10}


@pytest.mark.parametrize(("reach", "threshold"), [(1.0, 0.3), (2.0, -1.0), (0.5, 0.0), (0.0, 0.0)])
def test_ems_is_what_loops_give(reach: float, threshold: float) -> None:
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


def test_score_is_the_sum_of_shares() -> None:
    seen = rows.layer(pads=(0, 3), width=9)
    seen.queries = Query(torch.randn(2, 4, 3, 4, dtype=torch.float64), 6, 0.5, pos=torch.tensor([[6, 7, 8]] * 2))
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


def smooth(width: int = 24, seed: int = 5) -> Observation:
    """Return keys that change slowly from slot to slot."""
    seen = rows.layer(pads=(0, 3), width=width, seed=seed)
    seen.slots.k.copy_(seen.slots.k * 0.6 + seen.slots.k.cumsum(2))
    return seen


@pytest.mark.parametrize(("threshold", "keep"), [(-1.0, 12), (0.8, 12), (0.5, 6), (0.97, 12)])
def test_kvmerger_is_what_loops_give(threshold: float, keep: int) -> None:
    seen = smooth()
    score = rows.scores(seen)
    given = rows.plan(seen, score, keep)
    merge = ContiguousMerge(threshold, sinks=1, recent=2)
    slots, plan = merge(seen, score, given)
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            x = seen.slots.k[b, h]
            free = range(pad + 1, 22)
            links = {i: float(torch.cosine_similarity(x[i], x[i - 1], dim=0)) for i in free if i - 1 in free}
            usable = [i for i in sorted(links, key=lambda i: -links[i]) if links[i] > threshold]
            closed = set(usable[: 24 - pad - keep])
            sets: list[list[int]] = []
            for i in range(pad, 24):
                if i in closed:
                    sets[-1].append(i)
                else:
                    sets.append([i])
            pivots = {max(group, key=lambda i: float(score[b, h, i])): group for group in sets}
            for pivot, group in pivots.items():
                others = [i for i in group if i != pivot]
                far = {i: float((x[i] - x[pivot]).norm()) for i in group}
                sigma = sum(far[i] for i in others) / max(len(others), 1)
                weights = {i: math.exp(-(far[i] ** 2) / (2 * sigma**2)) if others else 1.0 for i in group}
                whole = sum(weights.values())
                for new, old in ((slots.k, seen.slots.k), (slots.v, seen.slots.v)):
                    wanted = sum(weights[i] / whole * old[b, h, i] for i in group)
                    torch.testing.assert_close(new[b, h, pivot], wanted)
            edges = {pad, 22, 23}
            worth = {p: math.inf if p in edges else float(score[b, h, p]) for p in pivots}
            wanted_kept = sorted(sorted(worth, key=lambda p: -worth[p])[:keep])
            assert (plan[b, h] >= 0).nonzero()[:, 0].tolist() == wanted_kept
    rows.check(merge, seen, score, given)


def test_equal_keys_weigh_the_same_and_count() -> None:
    seen = rows.of(torch.ones(1, 1, 5, 3, dtype=torch.float64), torch.eye(5).double()[None, None])
    plan = torch.tensor([[[0, -1, -1, -1, -1]]], dtype=torch.int8)
    score = torch.tensor([[[0.1, 0.2, 0.9, 0.3, 0.4]]])
    slots, found = ContiguousMerge(0.9, count=True)(seen, score, plan)
    assert (found >= 0).nonzero()[:, 2].tolist() == [2]  # the pivot keeps its place
    torch.testing.assert_close(slots.v[0, 0, 2], torch.full((5,), 0.2).double())
    torch.testing.assert_close(slots.meta["logn"][0, 0, 2].exp().item(), 5.0)
    again, _ = ContiguousMerge(0.9)(seen, score, plan)
    assert "logn" not in again.meta


def tagged(tags: list[int]) -> Observation:
    seen = rows.of(torch.randn(1, 1, len(tags), 2))
    seen.slots.meta["tag"] = torch.tensor(tags, dtype=torch.int32)[None, None]
    return seen


def kept(seen: Observation, score: Score, budget: int, everything: bool = False) -> list[int]:
    planner = AllText(TopK()) if everything else TopK()
    plan = planner(score(seen), torch.full((1, 1), budget), seen)
    return (plan[0, 0] >= 0).nonzero()[:, 0].tolist()


def test_text_comes_before_images_and_official_code_overshoots() -> None:
    seen = tagged([0, 1, 1, 0, 1, 0])
    score = TextFirst(Recency())
    assert kept(seen, score, 4) == [0, 3, 4, 5]  # all text, and the best image
    assert kept(seen, score, 2) == [3, 5]
    assert kept(seen, score, 2, everything=True) == [0, 3, 5]
    assert kept(seen, score, 4, everything=True) == [0, 3, 4, 5]
    assert kept(seen, TextFirst(Recency(), text=1), 4) == [1, 2, 4, 5]


def test_it_observes_what_the_other_score_observes() -> None:
    heads = RetainingHeads(torch.zeros(1, 8, 4), torch.zeros(1, 4, 2))
    for score in (Window(size=7), Mass(mean=True), Retained(heads)):
        mine = TextFirst(score)
        assert (mine.window, mine.statistics) == (score.window, score.statistics)
        assert (mine.attends, mine.wants_out) == (score.attends, score.wants_out)
    stats = {"locret": torch.ones(2, 2, 3)}
    q, k, v = torch.ones(2, 2, 3, 2), torch.ones(2, 2, 3, 1), torch.ones(2, 2, 3, 1)
    TextFirst(Retained(heads)).enter(stats, Query(q, 0, 1.0), Slots(k, v, {}), 0)
    assert not stats["locret"].any()

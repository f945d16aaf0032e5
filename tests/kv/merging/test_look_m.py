"""LOOK-M: three ways of merging, and text before images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.merging.look_m import AllText, NearestMerge, TextFirst
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.score.attention import Mass, Window
from diffcache.kv.score.base import Score
from diffcache.kv.score.learned import Retained, RetainingHeads
from diffcache.kv.score.recency import Recency
from diffcache.kv.slots import Slots
from tests.kv.merging import rows


def reference(seen: Observation, plan: Tensor, x: Tensor, way: str) -> Tensor:
    new = x.clone()
    batch, heads, width, _ = x.shape
    for b in range(batch):
        for h in range(heads):
            valid = seen.valid.expand(plan.shape)[b, h]
            k = seen.slots.k[b, h]
            kept = [s for s in range(width) if plan[b, h, s] >= 0 and valid[s]]
            groups: dict[int, list[tuple[int, float]]] = {t: [] for t in kept}
            for s in range(width):
                if plan[b, h, s] < 0 and valid[s]:
                    all_of = [float(torch.cosine_similarity(k[s], k[t], dim=0)) for t in kept]
                    groups[kept[all_of.index(max(all_of))]].append((s, max(all_of)))
            for t, group in groups.items():
                taken = x[b, h, t].clone()
                for s, likeness in group:
                    if way == "averaged":
                        taken += x[b, h, s]
                    elif way == "pivot":
                        taken += (x[b, h, s] + x[b, h, t]) / 2
                    else:
                        taken += likeness * x[b, h, s]
                new[b, h, t] = taken / (1 + len(group))
    return new


@pytest.mark.parametrize("way", ["averaged", "pivot", "weighted"])
def test_it_is_what_loops_give(way: str) -> None:
    seen = rows.layer()
    score = rows.scores(seen)
    plan = rows.plan(seen, score, 4)
    merge = NearestMerge(way)  # type: ignore[arg-type]
    slots, same = merge(seen, score, plan)
    torch.testing.assert_close(slots.k, reference(seen, plan, seen.slots.k, way))
    torch.testing.assert_close(slots.v, reference(seen, plan, seen.slots.v, way))
    assert torch.equal(same, plan)
    rows.check(merge, seen, score, plan)


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


def test_without_tags_all_is_text() -> None:
    seen = rows.of(torch.randn(1, 1, 5, 2))
    assert kept(seen, TextFirst(Recency()), 2) == [3, 4]
    assert kept(seen, TextFirst(Recency()), 2, everything=True) == [0, 1, 2, 3, 4]
    assert kept(seen, TextFirst(Recency(), text=7), 2) == [3, 4]


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


def test_padding_is_no_text() -> None:
    seen = rows.layer()
    plan = AllText(TopK())(rows.scores(seen), torch.full((2, 2), 2), seen)
    assert torch.equal(plan >= 0, seen.valid.expand(plan.shape))

"""Mergers against loops over slots: matches, buckets, zero classes, neighbors, centroids; nothing is lost or made."""

import math
from dataclasses import replace
from statistics import median_low

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.merging.absorb import Match, by_position, parted
from diffcache.kv.merging.chelsea import SoftMatching
from diffcache.kv.merging.d2o import DenseLayers, Density, EmaMerge
from diffcache.kv.merging.diversity import Diversity
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
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View
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


def chelsea_by_hand(seen: Observation, b: int, h: int, keep: int, chunk: int, edges: set[int]) -> dict:
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
def test_chelsea_is_what_loops_give(keep: int, chunk: int) -> None:
    seen = rows.layer(pads=(0, 3), width=24)
    score = rows.scores(seen)
    merge = SoftMatching(chunk, sinks=1, recent=2)
    given = rows.plan(seen, score, keep)
    slots, plan = merge(seen, score, given)
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            wanted = chelsea_by_hand(seen, b, h, keep, chunk, {pad, 22, 23})
            assert (plan[b, h] >= 0).nonzero()[:, 0].tolist() == sorted(wanted)
            assert sum(n for _, _, n in wanted.values()) == 24 - pad
            for s, (k, v, n) in wanted.items():
                torch.testing.assert_close(slots.k[b, h, s], k)
                torch.testing.assert_close(slots.v[b, h, s], v)
                torch.testing.assert_close(slots.meta["logn"][b, h, s].exp().item(), float(n))
                if n == 1:
                    assert torch.equal(slots.k[b, h, s], seen.slots.k[b, h, s])
    rows.check(merge, seen, score, given)


def test_all_protected_in_chelsea_falls_back_to_the_latest() -> None:
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
def test_tokens_of_kvcrush_are_what_loops_give(anchor: str) -> None:
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
def test_blocks_of_kvcrush_are_what_loops_give(anchor: str) -> None:
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


def d2o_by_hand(seen: Observation, plan: Tensor, gates: dict[tuple[int, int], float], beta: float) -> list[Tensor]:
    """Merge with loops, and move the gates."""
    k, v = seen.slots.k.clone(), seen.slots.v.clone()
    batch, heads, width, _ = k.shape
    for b in range(batch):
        for h in range(heads):
            valid = seen.valid.expand(plan.shape)[b, h]
            kept = [s for s in range(width) if plan[b, h, s] >= 0 and valid[s]]
            gone = [s for s in range(width) if plan[b, h, s] < 0 and valid[s]]
            if not gone:
                continue
            x = seen.slots.k[b, h]
            near, best = {}, {}
            for s in gone:
                all_of = [float(torch.cosine_similarity(x[s], x[t], dim=0)) for t in kept]
                best[s] = max(all_of)
                near[s] = kept[all_of.index(best[s])]
            mean = sum(best.values()) / len(best)
            old = gates.get((b, h))
            gates[b, h] = mean if old is None else beta * mean + (1 - beta) * old
            for t in kept:
                group = [s for s in gone if near[s] == t and best[s] >= gates[b, h]]
                if not group:
                    continue
                whole = math.e + sum(math.exp(best[s]) for s in group)
                for new, x_of in ((k, seen.slots.k), (v, seen.slots.v)):
                    parts = sum(math.exp(best[s]) / whole * x_of[b, h, s] for s in group)
                    new[b, h, t] = math.e / whole * x_of[b, h, t] + parts
    return [k, v]


def test_d2o_is_what_loops_give_twice_in_a_row() -> None:
    seen = rows.layer(width=20)
    merge = EmaMerge(0.7)
    gates: dict[tuple[int, int], float] = {}
    for seed, keep in ((1, 9), (2, 4)):
        score = rows.scores(seen, seed)
        plan = rows.plan(seen, score, keep)
        slots, same = merge(seen, score, plan)
        k, v = d2o_by_hand(seen, plan, gates, 0.7)
        torch.testing.assert_close(slots.k, k)
        torch.testing.assert_close(slots.v, v)
        assert torch.equal(same, plan)
        found = slots.meta["d2o_gate"].amax(-1) - 2
        wanted = torch.tensor([[gates[b, h] for h in range(2)] for b in range(2)])
        torch.testing.assert_close(found, wanted)
        # What was dropped is empty from now on.
        pos = slots.pos.expand(plan.shape).where(plan >= 0, -1)
        seen = replace(seen, slots=replace(slots, meta={**slots.meta, "pos": pos}))


def test_d2o_keeps_the_promises_of_a_merger() -> None:
    seen = rows.layer()
    score = rows.scores(seen)
    for mode in ("paper", "official"):
        rows.check(EmaMerge(mode=mode), seen, score, rows.plan(seen, score, 5))  # type: ignore[arg-type]


def test_density_is_the_variance_of_column_sums() -> None:
    q, k = torch.randn(1, 4, 6, 2), torch.randn(1, 2, 6, 2)
    query, slots = Query(q, 0, 1.0), Slots(k, k, {"pos": span(0, 6, 1, k.device)})
    probs = query.grouped(2) @ k[:, :, None].mT
    probs = probs.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    score = Density(Mass())
    stats = {name: torch.zeros(1, 2, 6) for name in score.statistics}
    score.note(stats, Attended(query, View(slots, 0)))
    column = probs.sum(3).mean((1, 2))[0]
    wanted = column.var(unbiased=False) / column.mean() ** 2
    torch.testing.assert_close(stats["d2o_density"], wanted.expand(1, 2, 6))
    before = stats["d2o_density"].clone()
    score.note(stats, Attended(query.narrow(5, 6), View(slots)))
    assert torch.equal(stats["d2o_density"], before)  # generated tokens change no share
    torch.testing.assert_close(stats["mass"], (probs.sum(3) + probs[:, :, :, -1]).mean(2))


def layers(spreads: list[float], width: int = 40) -> list[Observation]:
    found = []
    for spread in spreads:
        seen = rows.layer(pads=(0, 5), width=width)
        seen.stats["d2o_density"] = torch.full((2, 2, width), spread)
        found.append(seen)
    return found


def test_even_layers_hold_more_and_the_sum_is_exact() -> None:
    seen = layers([0.5, 1.0, 4.0])
    found = torch.stack(DenseLayers(10).allot([], seen))
    assert (found.sum(0) == 30).all()
    assert (found[0] > found[1]).all() and (found[1] > found[2]).all()
    share = (-torch.tensor([0.5, 1.0, 4.0]) / (5.5 / 3)).softmax(0) * 30
    assert ((found[:, 0, 0] - share).abs() < 1).all()

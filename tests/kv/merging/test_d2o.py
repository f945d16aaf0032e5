"""D2O: the gate, the weights, the layers' shares."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.merging.d2o import DenseLayers, Density, EmaMerge
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import Mass
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View
from tests.kv.merging import rows

GATE = "d2o_gate"


def reference(seen: Observation, plan: Tensor, gates: dict[tuple[int, int], float], beta: float) -> list[Tensor]:
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


def test_it_is_what_loops_give_twice_in_a_row() -> None:
    seen = rows.layer(width=20)
    merge = EmaMerge(0.7)
    gates: dict[tuple[int, int], float] = {}
    for seed, keep in ((1, 9), (2, 4)):
        score = rows.scores(seen, seed)
        plan = rows.plan(seen, score, keep)
        slots, same = merge(seen, score, plan)
        k, v = reference(seen, plan, gates, 0.7)
        torch.testing.assert_close(slots.k, k)
        torch.testing.assert_close(slots.v, v)
        assert torch.equal(same, plan)
        found = slots.meta[GATE].amax(-1) - 2
        wanted = torch.tensor([[gates[b, h] for h in range(2)] for b in range(2)])
        torch.testing.assert_close(found, wanted)
        # What was dropped is empty from now on.
        pos = slots.pos.expand(plan.shape).where(plan >= 0, -1)
        seen = replace(seen, slots=replace(slots, meta={**slots.meta, "pos": pos}))


def test_it_keeps_the_promises_of_a_merger() -> None:
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

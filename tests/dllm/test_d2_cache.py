"""d2Cache against rows chosen in loops, a rollout by products of matrices, and stale states."""

from __future__ import annotations

from itertools import pairwise
from math import exp
from typing import Any

import torch
from torch import Tensor

from diffcache.dllm import D2Cache, Sampler, Schedule, Threshold
from diffcache.dllm.d2_cache import NotedPlan
from tests.dllm.cases import ANSWER, LENGTHS, LONGEST, VALID, WIDTH, model
from tests.dllm.toys import MASK, Compared, Noted, after, check_step, following, prompts, trace

CASES: dict[str, tuple[D2Cache, Schedule, Sampler]] = {
    "narrow": (D2Cache(3, 2.0, 0.3, 3), Schedule(ANSWER, 8), Sampler()),
    "beyond the block": (D2Cache(7, 10.0, 0.1, 0), Schedule(ANSWER, 4, 8), Sampler()),
    "threshold": (D2Cache(4, 1.0, 0.0, 2), Schedule(ANSWER, 8), Sampler(rule=Threshold(0.4))),
    "window": (D2Cache(4, 4.0, 0.2), Schedule(ANSWER, None, window=3), Sampler()),
}


def density(decided: list[bool], place: int, sigma: float) -> float:
    size = len(decided)

    def bell(distance: int) -> float:
        return exp(-(distance**2) / (2 * sigma**2))

    known = [True] * size + decided + [decided[-1]] * size
    found = sum(bell(place + size - other) for other, is_in in enumerate(known) if is_in)
    return found / sum(bell(distance) for distance in range(-3 * size, 3 * size))


def nucleus(scores: dict[int, float], part: float) -> set[int]:
    total, best = sum(scores.values()), sorted(scores, key=lambda p: -scores[p])
    taken, so_far = {best[0]}, 0.0
    for place in best:
        so_far += scores[place] / total
        if so_far > part:
            break
        taken.add(place)
    return taken


def rollout(maps: list[Tensor], row: int, fed: list[int], skip: int) -> Tensor:
    """Return the column sums of the product of all layers' matrices, of the real positions."""
    product = torch.eye(WIDTH - skip, dtype=torch.float64)
    for weights in maps:
        layer = torch.eye(WIDTH, dtype=torch.float64)
        for column, place in enumerate(fed):
            layer[place] = weights[row, :, column].mean(0)
        layer = layer[skip:, skip:] + torch.eye(WIDTH - skip)
        product = layer / layer.sum(1, keepdim=True) @ product
    return product.sum(0)


def expected(name: str, notes: list[Noted], step: int, row: int, known: Any) -> set[int]:
    """Return the rows of a sequence, given what is known of it: confidence and influence."""
    (policy, schedule, _), (confidence, influence), now = CASES[name], known, notes[step]
    block, window = schedule.size, schedule.window or ANSWER
    masks = [p for p in range(LONGEST, WIDTH) if now.ids[row, p] == MASK]
    decided = [bool(now.ids[row, p] != MASK) for p in range(LONGEST, WIDTH)]
    may = [p for p in masks if p < now.starts[row] + block][:window]
    kth = masks[policy.current_k - 1] if len(masks) >= policy.current_k else WIDTH - 1
    stop = LONGEST + ((kth - LONGEST) // block + 1) * block
    worth = {
        p: (p in may, float(confidence[p]) * density(decided, p - LONGEST, policy.sigma)) for p in masks if p < stop
    }
    rows = set(sorted(worth, key=lambda p: worth[p], reverse=True)[: policy.current_k])
    rows |= now.decided(row) - notes[step - 1].decided(row)
    skip = LONGEST - LENGTHS[row]
    others = {p: float(influence[p - skip]) for p in range(skip, WIDTH) if p not in rows}
    rows |= nucleus(others, policy.rollout_p)
    ordered = sorted(rows)
    for low, high in pairwise(ordered):
        if high - low <= policy.inflate_w:
            rows |= set(range(low, high))
    return rows


def compared(name: str) -> Compared:
    """Hold rows, notes and logits against those of the oracle."""
    policy, schedule, sampler = CASES[name]
    decoding, notes = trace(model(), policy, prompts(*LENGTHS), schedule, sampler)
    found, kept, confidence = Compared(), None, torch.zeros(2, WIDTH, dtype=torch.float64)
    flows: list[Tensor] = []
    for step, now in enumerate(notes):
        maps: list[Tensor] = []
        logits, _ = check_step(model(), now, kept, VALID, maps=maps, found=found)
        found.goes_on(following(decoding, notes, step), after(now, logits, schedule, sampler))
        before, flows = flows, []
        assert isinstance(now.plan, NotedPlan)
        for row, length in enumerate(LENGTHS):
            fed, skip = now.rows[row].tolist(), LONGEST - length
            flows.append(rollout(maps, row, fed, skip))
            is_active = bool((now.ids[row] == MASK).any())
            if is_active and step:
                wanted = expected(name, notes, step, row, (confidence[row], before[row]))
                assert now.fed(row) == wanted
                assert any(now.ids[row, p] == MASK for p in wanted)
            confidence[row, fed] = logits[row].softmax(-1).amax(-1)
            if is_active:
                notes_of = {name: each[row, skip:] for name, each in now.plan.notes.items()}
                wanted_of = {"influence": flows[row], "confidence": confidence[row, skip:]}
                torch.testing.assert_close(notes_of, wanted_of, rtol=0, atol=1e-10)
        kept = now.kept
    assert any(len(now.fed(0)) < WIDTH // 2 for now in notes)
    return found

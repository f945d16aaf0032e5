"""Every policy against a full recompute with stale keys and values put in by hand, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from diffcache.dllm import (
    DKVCache,
    FastDLLM,
    FreeCache,
    Policy,
    RowPlan,
    Sampler,
    Schedule,
    Threshold,
    Uncached,
    check_coverage,
)
from tests.dllm.toys import LAYERS, MASK, Noted, bidirectional, by_hand, padded, prompts, trace

LENGTHS = (9, 5)  # of the prompts
LONGEST, ANSWER, BLOCK = max(LENGTHS), 16, 8
WIDTH = LONGEST + ANSWER
SCHEDULE = Schedule(ANSWER, BLOCK)
RANDOM = Sampler(by="random")
POLICIES: dict[str, tuple[Policy, Sampler]] = {
    "decode": (DKVCache(every=4), Sampler()),
    "decode, no delay": (DKVCache(every=4, delay=False), Sampler()),
    "greedy": (DKVCache("greedy", every=3, window=2), RANDOM),
    "greedy, previous": (DKVCache("greedy", every=3, window=3, center="previous"), RANDOM),
    "prefill": (DKVCache("prefill"), Sampler()),
    "pd": (DKVCache("pd", every=4), Sampler()),
    "prefix": (FastDLLM(), Sampler()),
    "dual": (FastDLLM(dual=True), Sampler()),
    "free": (FreeCache(), Sampler()),
    "free, commit": (FreeCache(commit=True), Sampler()),
}
FROZEN_MASKS = ("decode, no delay", "free")  # what they freeze was never computed as a word


@cache
def model() -> Any:
    return bidirectional()


@cache
def traced(name: str) -> tuple[Any, list[Noted]]:
    policy, sampler = POLICIES[name]
    return trace(model(), policy, prompts(*LENGTHS), SCHEDULE, sampler)


def real(row: int) -> set[int]:
    """Return the positions of a sequence that are no padding."""
    return set(range(LONGEST - LENGTHS[row], WIDTH))


def expected(name: str, notes: list[Noted], step: int, row: int) -> set[int] | None:
    """Return the rows of one step, by the papers' row sets; None for all of them."""
    now, inner, whole = notes[step], notes[step].steps[row], real(row)
    start, answer = now.starts[row], set(range(LONGEST, WIDTH))
    before = notes[max(step - 1, 0)].decided(row)
    if step == 0:
        return None
    if name.startswith("decode"):
        if inner < 2 or inner % 4 == 0:
            return None
        return whole - (now.decided(row) if "no delay" in name else before)
    if name == "prefill":
        return answer
    if name == "pd":
        return answer if step % 4 == 0 else answer - before
    if name in ("prefix", "dual"):
        return None if inner == 0 else set(range(start, start + BLOCK if name == "dual" else WIDTH))
    if name.startswith("free"):
        again = BLOCK if "commit" in name and inner == 0 else 0
        return set(range(start - again, WIDTH))
    return None if inner % 3 == 0 else greedy(name, notes, step, row)


def greedy(name: str, notes: list[Noted], step: int, row: int) -> set[int]:
    now, before, whole = notes[step], notes[step - 1].decided(row), real(row)
    after = notes[step + 1].decided(row) if step + 1 < len(notes) else whole
    coming, just = after - now.decided(row), now.decided(row) - before
    masks = whole - now.decided(row)
    if "previous" in name:
        near = {p + d for p in just for d in (-1, 0, 1, 2)} & masks
    else:
        near = set()
        for p in coming:
            near |= set(sorted(masks - coming, key=lambda m: (abs(m - p), m > p))[:2])
    return coming | just | near


@pytest.mark.parametrize("name", POLICIES)
def test_the_rows_of_the_paper_are_computed(name: str) -> None:
    notes = traced(name)[1]
    assert len(notes) == ANSWER
    partial = 0
    for step, now in enumerate(notes):
        for row in range(len(LENGTHS)):
            rows = expected(name, notes, step, row)
            assert now.fed(row) == (set(range(WIDTH)) if rows is None else rows)
            partial += rows is not None
    assert partial


@pytest.mark.parametrize("name", POLICIES)
def test_logits_and_what_is_held_are_those_of_the_oracle(name: str) -> None:
    valid = padded(prompts(*LENGTHS))[1]
    assert valid is not None
    valid = torch.cat([valid, torch.ones(len(valid), ANSWER, dtype=torch.bool)], dim=1)
    kept, seen = None, 0
    for now in traced(name)[1]:
        logits, fresh = by_hand(model(), now.ids, now.rows, kept, valid)
        there = valid.gather(1, now.rows)
        torch.testing.assert_close(now.logits[there], logits[there], rtol=0, atol=1e-10)
        fed = torch.zeros_like(valid).scatter_(1, now.rows, True)
        for layer in range(LAYERS):
            for ours, theirs, old in zip(now.kept[layer], fresh[layer], (kept or fresh)[layer],
                                         strict=True):  # fmt: skip
                ours, theirs, old = (x.transpose(1, 2) for x in (ours, theirs, old))
                torch.testing.assert_close(ours[valid], theirs[valid], rtol=0, atol=1e-10)
                if kept is not None and not bool(fed.all()):  # frozen to the bit
                    assert torch.equal(ours[~fed], old[~fed])
                    seen += 1
        kept = [tuple(x.clone() for x in pair) for pair in now.kept]  # type: ignore[misc]
    assert seen


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in FROZEN_MASKS])
def test_the_first_layer_is_never_stale(name: str) -> None:
    """Keys and values of the first layer depend on the token alone."""
    for now in traced(name)[1]:
        every = torch.arange(WIDTH).expand_as(now.ids)
        _, fresh = by_hand(model(), now.ids, every, None)
        changed = 0.0
        for row, length in enumerate(LENGTHS):
            ours, theirs = now.kept[0][1][row], fresh[0][1][row]
            changed = max(changed, float((ours - theirs)[:, LONGEST - length :].abs().max()))
        assert changed < 1e-12


def test_the_released_free_cache_freezes_masks_for_good() -> None:
    """Of the last commit of a block, the mask's values are held; one more forward mends that."""
    held = {}
    for name in ("free", "free, commit"):
        notes = traced(name)[1]
        last, after = notes[BLOCK - 1], notes[BLOCK]
        row = 0
        position = (last.ids[row] != after.ids[row]).nonzero().item()
        word = by_hand(model(), after.ids, torch.tensor([[position]] * 2), notes[0].kept)[1][0][1]
        mask = by_hand(model(), last.ids, torch.tensor([[position]] * 2), notes[0].kept)[1][0][1]
        ours = notes[-1].kept[0][1][row, :, position]
        held[name] = [bool((ours - x[row, :, position]).abs().max() < 1e-12) for x in (word, mask)]
    assert held == {"free": [False, True], "free, commit": [True, False]}


def test_without_the_delay_the_answer_is_another_one() -> None:
    """The negative control: what is frozen as a mask must show."""
    delayed, hasty = traced("decode")[1], traced("decode, no delay")[1]
    step = next(i for i, now in enumerate(hasty) if len(now.fed(0)) < WIDTH)
    gap = {}
    for name, notes in (("decode", delayed), ("hasty", hasty)):
        now = notes[step]
        every = torch.arange(WIDTH).expand_as(now.ids)
        true = by_hand(model(), now.ids, every, None, None)[0].gather(
            1, now.rows[..., None].expand(-1, -1, 64)
        )
        open_ = now.ids[0].gather(0, now.rows[0]) == MASK
        gap[name] = float((now.logits[0][open_] - true[0][open_]).abs().max())
    assert gap["hasty"] > 3 * gap["decode"]
    assert not torch.equal(traced("decode")[0].ids, traced("decode, no delay")[0].ids)


# the limits ------------------------------------------------------------------------------------

LIMITS: dict[str, tuple[Policy, Schedule, Sampler]] = {
    "all rows": (Uncached(), SCHEDULE, Sampler()),
    "decode, every step": (DKVCache(every=1), SCHEDULE, Sampler()),
    "decode, blocks of two steps": (DKVCache(every=9), Schedule(ANSWER, BLOCK, 4), Sampler()),
    "greedy, every step": (DKVCache("greedy", every=1), SCHEDULE, RANDOM),
    "prefix, blocks of a step": (FastDLLM(), Schedule(ANSWER, BLOCK, 2), Sampler()),
    "dual, threshold 0": (FastDLLM(dual=True), SCHEDULE, Sampler(rule=Threshold(0))),
    "decode, threshold 0": (DKVCache(), SCHEDULE, Sampler(rule=Threshold(0))),
    "decode, every step, threshold": (DKVCache(every=1), SCHEDULE, Sampler(rule=Threshold(0.3))),
}


@pytest.mark.parametrize("lengths", [(9,), LENGTHS], ids=["alone", "padded"])
@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_the_uncached_model_bit_for_bit(name: str, lengths: tuple[int, ...]) -> None:
    policy, schedule, sampler = LIMITS[name]
    network = bidirectional(torch.float32)
    ours, notes = trace(network, policy, prompts(*lengths), schedule, sampler)
    stock, plain = trace(network, None, prompts(*lengths), schedule, sampler)
    assert len(notes) == len(plain)
    for now, other in zip(notes, plain, strict=True):
        assert now.plan.rows is None
        assert torch.equal(now.logits, other.logits)
    assert torch.equal(ours.ids, stock.ids)


def test_all_rows_one_by_one_are_the_uncached_model() -> None:
    """Indices and runs write and read what a plan of all rows does."""
    network = bidirectional(torch.float32)

    class Listed(Uncached):
        def plan(self, state: Any) -> RowPlan:
            if state.step == 0:
                return RowPlan()
            if state.step % 2:
                return RowPlan(range(state.width))
            return RowPlan(torch.arange(state.width).expand(len(state.ids), -1))

    for lengths in ((9,), LENGTHS):
        _, notes = trace(network, Listed(), prompts(*lengths), SCHEDULE)
        _, plain = trace(network, None, prompts(*lengths), SCHEDULE)
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(notes, plain, strict=True))


def test_pd_that_refreshes_always_is_prefill() -> None:
    rows = prompts(*LENGTHS)
    one, _ = trace(model(), DKVCache("pd", every=1), rows, SCHEDULE)
    other, _ = trace(model(), DKVCache("prefill"), rows, SCHEDULE)
    assert torch.equal(one.ids, other.ids)


# coverage, padding, batches ----------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_plans_cover_what_changed(name: str) -> None:
    policy, sampler = POLICIES[name]

    class Checked(Policy):
        def plan(self, state: Any) -> RowPlan:
            plan = policy.plan(state)
            check_coverage(state, plan)
            return plan

    if name in FROZEN_MASKS:
        with pytest.raises(ValueError, match="leaves out position .* was changed by the last step"):
            trace(model(), Checked(), prompts(*LENGTHS), SCHEDULE, sampler)
    else:
        trace(model(), Checked(), prompts(*LENGTHS), SCHEDULE, sampler)


@pytest.mark.parametrize("rule", ["quota", "threshold"])
@pytest.mark.parametrize("name", [n for n in POLICIES if not n.startswith("greedy")])
def test_a_padded_batch_is_its_prompts_alone(name: str, rule: str) -> None:
    """With a threshold, sequences leave their blocks at different steps."""
    policy = POLICIES[name][0]
    sampler = Sampler() if rule == "quota" else Sampler(rule=Threshold(0.4))
    if rule == "quota":
        together = traced(name)[0]
    else:
        together = trace(model(), policy, prompts(*LENGTHS), SCHEDULE, sampler)[0]
    steps = set()
    for row, prompt in enumerate(prompts(*LENGTHS)):
        alone = trace(model(), policy, [prompt], SCHEDULE, sampler)[0]
        assert torch.equal(alone.ids[0, len(prompt) :], together.ids[row, LONGEST:])
        steps.add(alone.step)
    assert (len(steps) > 1) == (rule == "threshold")


def test_rows_fed_alone_are_those_fed_together() -> None:
    """Nothing changed since all rows were computed: any rows give the same logits."""
    import diffcache

    network, ids = model(), torch.tensor(prompts(12))
    with torch.no_grad(), diffcache.wrapped(network, Uncached()), diffcache.run(network):
        whole = network(ids, row_plan=RowPlan(), use_cache=False).logits
        for rows in ([4], [0, 11], [2, 3, 9]):
            some = network(ids, row_plan=RowPlan(torch.tensor([rows])), use_cache=False).logits
            torch.testing.assert_close(some[0], whole[0, rows], rtol=0, atol=1e-12)


def test_rows_are_filled_up_to_a_multiple() -> None:
    rows = prompts(*LENGTHS)
    plain = traced("decode")[0]
    wide, notes = trace(model(), POLICIES["decode"][0], rows, Schedule(ANSWER, BLOCK, multiple=8))
    assert torch.equal(plain.ids, wide.ids)
    assert {now.rows.shape[1] for now in notes} <= {8, 16, 24, WIDTH}

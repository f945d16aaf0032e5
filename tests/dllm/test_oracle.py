"""Every policy of rows against a full recompute with stale keys and values put in by hand, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffcache.dllm import DKVCache, RowPlan, Schedule, Uncached
from tests.dllm.cases import (
    ANSWER,
    BLOCK,
    CASES,
    LENGTHS,
    LONGEST,
    ROW_PLANS,
    SCHEDULE,
    WIDTH,
    model,
    traced,
)
from tests.dllm.toys import LAYERS, MASK, Noted, bidirectional, by_hand, padded, prompts, trace


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
    if name.startswith("window"):
        every = 6 if "narrow" in name else 5
        return None if step % every == 0 else active(notes, step, step % every, row)
    return None if inner % 3 == 0 else greedy(name, notes, step, row)


def active(notes: list[Noted], step: int, inner: int, row: int) -> set[int]:
    """Return five masks, the words of the phase after its first step, and those just decided."""
    now, before = notes[step].decided(row), notes[step - 1].decided(row)
    masks = sorted(real(row) - now)[:5]
    return set(masks) | (now - notes[step - inner + 1].decided(row)) | (now - before)


def seen(name: str, notes: list[Noted], step: int) -> torch.Tensor | None:
    """Return what rows see where that is not all, bool [2, T]."""
    if name != "window, narrow" or step % 6 == 0:
        return None
    flags = torch.ones(2, WIDTH, dtype=torch.bool)
    for row in range(2):
        far = sorted(real(row) - notes[step - step % 6 + 1].decided(row))[7:]
        near = sorted(real(row) - notes[step].decided(row))[:5]
        flags[row, sorted(set(far) - set(near))] = False
    return flags


def greedy(name: str, notes: list[Noted], step: int, row: int) -> set[int]:
    now, before, whole = notes[step], notes[step - 1].decided(row), real(row)
    after = notes[step + 1].decided(row) if step + 1 < len(notes) else whole
    coming, just = after - now.decided(row), now.decided(row) - before
    masks, near = whole - now.decided(row), set[int]()
    if "previous" in name:
        near = {p + d for p in just for d in (-1, 0, 1, 2)} & masks
        return coming | just | near
    order = traced(name)[0].state.order
    assert order is not None
    for center in sorted(coming, key=lambda p: -float(order[row, p - LONGEST])):
        walk = (center + sign * d for d in range(1, WIDTH) for sign in (-1, 1))
        near |= set([p for p in walk if p in masks - coming - near][:2])
    return coming | just | near


@pytest.mark.parametrize("name", ROW_PLANS)
def test_the_rows_of_the_paper_are_computed(name: str) -> None:
    notes = traced(name)[1]
    assert len(notes) == (CASES[name].schedule.steps or ANSWER)
    partial = 0
    for step, now in enumerate(notes):
        for row in range(len(LENGTHS)):
            rows = expected(name, notes, step, row)
            assert now.fed(row) == (set(range(WIDTH)) if rows is None else rows)
            partial += rows is not None
    assert partial


@pytest.mark.parametrize("name", ROW_PLANS)
def test_logits_and_what_is_held_are_those_of_the_oracle(name: str) -> None:
    valid = padded(prompts(*LENGTHS))[1]
    assert valid is not None
    valid = torch.cat([valid, torch.ones(len(valid), ANSWER, dtype=torch.bool)], dim=1)
    kept = None
    notes = traced(name)[1]
    for step, now in enumerate(notes):
        logits, fresh = by_hand(model(), now.ids, now.rows, kept, valid, seen(name, notes, step))
        there = valid.gather(1, now.rows)
        torch.testing.assert_close(now.logits[there], logits[there], rtol=0, atol=1e-10)
        for layer in range(LAYERS):
            for ours, theirs in zip(now.kept[layer], fresh[layer], strict=True):
                ours, theirs = ours.transpose(1, 2)[valid], theirs.transpose(1, 2)[valid]
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        kept = [tuple(x.clone() for x in pair) for pair in now.kept]  # type: ignore[misc]


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


# the engine ------------------------------------------------------------------------------------


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


def test_rows_are_filled_up_to_a_multiple() -> None:
    rows = prompts(*LENGTHS)
    plain = traced("decode")[0]
    wide, notes = trace(model(), CASES["decode"].policy, rows, Schedule(ANSWER, BLOCK, multiple=8))
    assert torch.equal(plain.ids, wide.ids)
    assert {now.rows.shape[1] for now in notes} <= {8, 16, 24, WIDTH}

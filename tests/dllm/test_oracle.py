"""Every policy of rows against a full recompute with stale keys and values put in by hand, in float64."""

import torch

from tests.dllm.cases import ANSWER, BLOCK, CASES, LENGTHS, LONGEST, RANDOM, VALID, WIDTH, model, traced
from tests.dllm.toys import Compared, Noted, after, check_step, following


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
    if name in ("vicinity", "dpad", "entropy-cache"):
        return around(name, notes, step, row)
    if name.startswith("free"):
        again = BLOCK if "commit" in name and inner == 0 else 0
        return set(range(start - again, WIDTH))
    if name.startswith("window"):
        every = 6 if "narrow" in name else 5
        return None if step % every == 0 else active(notes, step, step % every, row)
    return None if inner % 3 == 0 else greedy(name, notes, step, row)


def around(name: str, notes: list[Noted], step: int, row: int) -> set[int] | None:
    """Return the block with what is near it, or with the masks after it that are ever seen."""
    if name == "entropy-cache":
        return sure(notes, step, row)
    inner, start, whole = notes[step].steps[row], notes[step].starts[row], real(row)
    if name == "vicinity":
        return None if step < 2 or inner == 0 else set(range(start - 2, start + BLOCK + 3)) & whole
    if inner:
        return set(range(start, start + BLOCK))
    return None if start + BLOCK + 3 >= WIDTH else set(range(start + BLOCK + 3)) & whole


def sure(notes: list[Noted], step: int, row: int) -> set[int] | None:
    """Return open masks and the three latest tokens; None after a commit of an entropy of 3.2."""
    last, now = notes[step - 1], notes[step].decided(row)
    just = now - last.decided(row)
    for place in just:
        odds = last.logits[row, last.rows[row].tolist().index(place)].softmax(-1)
        if -(odds * odds.log()).sum() >= 3.2:
            return None
    turns = [notes[n + 1].decided(row) - notes[n].decided(row) for n in range(step)]
    latest = [place for turn in turns for place in sorted(turn)][-3:]
    start = notes[step].starts[row]
    return (set(range(start, start + BLOCK)) - now) | {*latest} | just


def active(notes: list[Noted], step: int, inner: int, row: int) -> set[int]:
    """Return five masks, the words of the phase after its first step, and those just decided."""
    now, before = notes[step].decided(row), notes[step - 1].decided(row)
    masks = sorted(real(row) - now)[:5]
    return set(masks) | (now - notes[step - inner + 1].decided(row)) | (now - before)


def seen(name: str, notes: list[Noted], step: int) -> torch.Tensor | None:
    """Return what rows see where that is not all, bool [2, T]."""
    if name == "dpad":
        ends = torch.tensor(notes[step].starts)[:, None] + BLOCK + 3
        return torch.arange(WIDTH) < ends
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


def compared(name: str) -> Compared:
    """Hold rows, logits and what is held against those of the papers."""
    (decoding, notes), case, kept = traced(name), CASES[name], None
    found, partial, last = Compared(), 0, decoding.state.order if case.sampler is RANDOM else None
    assert len(notes) == (case.schedule.steps or ANSWER)
    for step, now in enumerate(notes):
        for row in range(len(LENGTHS)):
            rows = expected(name, notes, step, row)
            assert now.fed(row) == (set(range(WIDTH)) if rows is None else rows)
            partial += rows is not None
        logits, _ = check_step(model(), now, kept, VALID, seen=seen(name, notes, step), found=found)
        found.goes_on(following(decoding, notes, step), after(now, logits, case.schedule, case.sampler, last))
        kept = now.kept
    assert partial
    return found

"""Sparse-dLLM against a recompute by hand in which every layer hides what it evicted, in float64."""

from typing import Any

import torch
from torch import Tensor

from tests.dllm.cases import BLOCK, CONFIDENT, LENGTHS, LONGEST, SCHEDULE, VALID, WIDTH, model, traced
from tests.dllm.toys import Compared, after, by_hand, check_step, following


def kept(q: Tensor, keys: Tensor, row: int, start: int) -> set[int]:
    """Return what one layer keeps for a block: two fifths of what lies outside of it.

    Args:
        q: Queries of all rows, `[H, T, D]`.
        keys: Keys of all rows, `[Hkv, T, D]`.
        row: Number of the sequence.
        start: First position of the block.
    """
    mean = q[:, start : start + BLOCK].mean(1)
    keys = keys.repeat_interleave(len(q) // len(keys), 0)
    outside = [n for n in range(LONGEST - LENGTHS[row], WIDTH) if not start <= n < start + BLOCK]
    scores = [float((mean * keys[:, n]).sum(1).mean()) for n in outside]
    near = [max(scores[max(n - 1, 0) : n + 2]) for n in range(len(scores))]
    best = sorted(range(len(near)), key=lambda n: (-near[n], n))[: int(len(near) * 0.4)]
    return {outside[n] for n in best}


def compared(name: str) -> Compared:
    """Hold every step against one by hand."""
    network, held, seen, layers = model(), None, None, None
    (decoding, notes), found = traced(name), Compared()
    for step, now in enumerate(notes):
        inner, start = now.steps[0], now.starts[0]
        assert now.steps == (inner, inner)
        wanted = set(range(start, start + BLOCK)) if inner > 1 else None
        for row in range(2):
            assert now.fed(row) == (wanted or set(range(LONGEST - LENGTHS[row], WIDTH))) or (
                now.plan.rows is None and wanted is None
            )
        layers = seen if inner > 1 else None
        logits, held = check_step(network, now, held, VALID, seen=layers, found=found)
        found.goes_on(following(decoding, notes, step), after(now, logits, SCHEDULE, CONFIDENT))
        if inner != 1:
            continue
        queries: list[Tensor] = []
        by_hand(network, now.ids, now.rows, None, VALID, queries=queries)
        seen = []
        for q, (keys, _) in zip(queries, held, strict=True):
            flags: Any = torch.zeros(2, WIDTH, dtype=torch.bool)
            for row in range(2):
                flags[row, list(kept(q[row], keys[row], row, start))] = True
                flags[row, start : start + BLOCK] = True
            seen.append(flags)
        assert not torch.equal(seen[0], seen[1])  # layers keep other positions
    return found

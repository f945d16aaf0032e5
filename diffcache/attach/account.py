"""The account of a denoiser call: which sites ran, which were skipped, and what that cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diffcache.attach.layout import Layout
from diffcache.attach.learn import means

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine
    from diffcache.attach.frame import Frame


def account(engine: Engine, frame: Frame, layout: Layout | None) -> None:
    """Note what a call computed and skipped."""
    call, signature = frame.call, frame.branch.signature
    assert call is not None
    call.counts = _of_modules(frame) if layout is None else _of_blocks(frame, layout)
    if layout is None and frame.tally is not None:
        evaluations = {key: number for key, (number, _) in call.counts.items()}
        engine.flops[signature] = means(frame.tally, evaluations)
    call.flops_each = engine.flops.get(signature) if layout is None else layout.flops
    call.computed = bool(frame.computes)
    if frame.apart:
        call.computed = any(ran for ran, _ in call.counts.values())
    call.reason = call.reason or "method"
    for extension in engine.extensions:
        call.counts = {**call.counts, **extension.counts(frame)}
    call.seconds = time.perf_counter() - frame.started
    engine.handle.note(frame, call)


def _of_modules(frame: Frame) -> dict[str, tuple[int, int]]:
    """Return, per group of module sites, how many ran and were skipped."""
    counts: dict[str, list[int]] = {}
    for tap, visits in frame.visits.items():
        ran = counts.setdefault(tap.group, [0, 0])
        ran[0 if frame.runs(tap.name) else 1] += visits
    return {key: (ran, skipped) for key, (ran, skipped) in counts.items()}


def _of_blocks(frame: Frame, layout: Layout) -> dict[str, tuple[int, int]]:
    """Return, per list, how many blocks ran and were skipped."""
    if frame.counts:
        return frame.counts
    if frame.computes:
        return {key: (ran, 0) for key, ran in layout.totals.items()}
    return layout.counts if frame.decides else layout.follow_counts

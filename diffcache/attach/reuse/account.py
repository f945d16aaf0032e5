"""The account of a denoiser call: which sites ran, which were skipped, and what that cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diffcache.attach.reuse.layout import Layout, Work

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine
    from diffcache.attach.reuse.frame import Frame


def account(engine: Engine, frame: Frame, layout: Layout | None) -> None:
    """Note what a call computed and skipped."""
    call, signature = frame.call, frame.branch.signature
    assert call is not None
    if frame.tally is not None:
        engine.costs[signature] = frame.tally
    if layout is None:
        call.counts, call.flops = _of_modules(frame, engine.costs.recall(signature))
    else:
        work = _of_blocks(frame, layout)
        call.counts, call.flops = work.counts, work.flops
        if frame.looked and work.flops is not None and layout.look is not None:
            call.flops = work.flops[0] + layout.look, work.flops[1] - layout.look
    call.computed = bool(frame.computes)
    if frame.apart:
        call.computed = any(ran for ran, _ in call.counts.values())
    call.reason = call.reason or "method"
    for extension in engine.extensions:
        call.counts = {**call.counts, **extension.counts(frame)}
    call.seconds = time.perf_counter() - frame.started
    engine.handle.note(frame, call)


def _of_modules(
    frame: Frame, costs: dict[str, float | None] | None
) -> tuple[dict[str, tuple[int, int]], tuple[float, float] | None]:
    """Return, per group of module sites, how many ran and were skipped, and their operations."""
    counts: dict[str, list[int]] = {}
    flops, known = [0.0, 0.0], costs is not None
    for tap, visits in frame.visits.items():
        skipped = not frame.runs(tap.name)
        counts.setdefault(tap.group, [0, 0])[skipped] += visits
        cost = costs.get(tap.name) if costs is not None else None
        flops[skipped] += cost or 0.0
        known = known and cost is not None
    totals = {key: (ran, skipped) for key, (ran, skipped) in counts.items()}
    return totals, (flops[0], flops[1]) if known else None


def _of_blocks(frame: Frame, layout: Layout) -> Work:
    """Return how many blocks ran and were skipped."""
    if frame.mixed is not None:
        return frame.mixed
    if frame.computes:
        return layout.whole
    return layout.less if frame.decides else layout.follow_less

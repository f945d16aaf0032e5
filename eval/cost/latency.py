"""Time a pipeline uncached and under methods, in turn: a run that is timed and not scored."""

from __future__ import annotations

import time
from typing import Any

from diffcache.eval.cost.interleave import too_fast
from diffcache.eval.record import Setting, envelope
from diffcache.eval.report.table import TerminalTable, terminal_table
from diffcache.eval.runs.evaluate import WARM_UP, Plan, draw, start
from diffcache.eval.runs.measure import costs
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.record import row
from diffcache.eval.runs.task import Case
from diffcache.pipelines.demo.saved import DTYPES

_COUNTED = ("name", "kind", "steps", "evaluations", "computed_steps", "flops", "flops_ratio", "held_bytes")


def measure(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Time the rows of a plan; every row is drawn once, which tells its computed steps.

    Args:
        plan: Plan of the rows to time; its samples are one batch, its folder is new.
        progress: Display of the progress.

    Returns:
        The record, as `diffcache.eval.record` describes it; `warnings` is a list of sentences.

    Raises:
        FileNotFoundError: If there is no such pipeline.
        AttachError: If it cannot be cached with a method.
        ValueError: If an argument is wrong.
    """
    started = time.monotonic()
    run = start(plan, progress)
    drawer, size = run.drawer, plan.task.batch_size
    cases = [Case("uncached", "uncached", drawer.steps)]
    cases += [Case(name, "method", drawer.steps, method) for name, method in plan.methods.items()]
    progress.expect(len(cases) * size * (1 + WARM_UP + plan.rounds))
    for case in cases:  # what cannot work is refused before anything is drawn
        with drawer.wrapped(case):
            pass
    for case in cases:
        draw(run, case)
    counted = [row(run, case, {}) for case in cases]
    timed = costs(run, cases)
    allowed = {this["name"]: this["flops_ratio"] for this in counted}
    idle = [case.name for case, this in zip(cases[1:], counted[1:], strict=True) if this["evaluations"] >= case.steps]
    warnings = [timed["warning"]] if timed["warning"] else []
    body = {
        "shapes": {
            "device": drawer.device.type,
            "model": drawer.name,
            **drawer.call,
            "num_inference_steps": drawer.steps,
            "batch_size": size,
        },
        "rounds": plan.rounds,
        "warmup": WARM_UP,
        "seconds": round(time.monotonic() - started, 1),
        "rows": [{key: this[key] for key in _COUNTED} | timed["rows"][this["name"]] for this in counted],
        "warnings": [*warnings, *too_fast(timed["rows"], allowed), *(f"{name} skipped nothing" for name in idle)],
    }
    return envelope("latency", Setting(drawer.device, DTYPES[drawer.dtype]), plan.command, body)


def timed_table(record: dict[str, Any]) -> TerminalTable:
    """Return the table of a record that `measure` returned, for `rich` to print."""
    rows = record["rows"]
    times = {"rows": {row["name"]: row for row in rows}}
    return terminal_table({"metrics": {}, "rows": rows, "timing": times})

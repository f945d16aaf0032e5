"""Time a pipeline uncached and under methods, in turn: a run that is timed and not scored."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from diffcache.eval.cost.interleave import too_fast
from diffcache.eval.record import Setting, envelope
from diffcache.eval.runs.cost import costs
from diffcache.eval.runs.evaluate import WARM_UP, Plan, draw, start
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.record import row
from diffcache.eval.runs.task import Case
from diffcache.pipelines.demo.saved import DTYPES
from diffcache.run_report import human

Table = tuple[list[str], list[list[str]]]
_COUNTED = ("name", "steps", "evaluations", "computed_steps", "flops", "flops_ratio", "held_bytes")


def measure(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Time what a plan names; every row is drawn once, which tells what it computes.

    Args:
        plan: Plan of the rows to time; its samples are one batch, its folder is new.
        progress: Display of the progress.

    Returns:
        The record: see `diffcache.eval.record`; `warnings` is a list of sentences.

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
    idle = [case.name for case, this in zip(cases[1:], counted[1:], strict=True)
            if this["evaluations"] >= case.steps]  # fmt: skip
    warnings = [timed["warning"]] if timed["warning"] else []
    body = {
        "shapes": {"device": drawer.device.type, "model": drawer.name, **drawer.call,
                   "num_inference_steps": drawer.steps, "batch_size": size},
        "rounds": plan.rounds, "warmup": WARM_UP,
        "seconds": round(time.monotonic() - started, 1),
        "rows": [{key: this[key] for key in _COUNTED} | timed["rows"][this["name"]]
                 for this in counted],
        "warnings": [*warnings, *too_fast(timed["rows"], allowed),
                     *(f"{name} skipped nothing" for name in idle)],
    }  # fmt: skip
    return envelope("latency", Setting(drawer.device, DTYPES[drawer.dtype]), plan.command, body)


def tables(record: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return titles and rows of the tables that are printed: times, and what they are against."""
    rows = record["rows"]
    times = [
        [row["name"], *(_spread(row[key]) for key in ("seconds", "denoiser_seconds")),
         f"{row['cpu_seconds']['median']:.3g}", f"{row['throughput']:.3g}"]
        for row in rows
    ]  # fmt: skip
    further = [key for key in ("peak_bytes", "joules") if key in rows[0]]
    costs = [
        [row["name"], _spread(row["ratio"]),
         *(f"{row[key]['median']:.3g}" for key in ("cpu_ratio", "denoiser_ratio")),
         "n/a" if row["flops_ratio"] is None else f"{row['flops_ratio']:.2f}",
         f"{row['computed_steps']:g}/{row['steps']:g}", human(row["held_bytes"], "B"),
         *(_further(row, key) for key in further)]
        for row in rows
    ]  # fmt: skip
    titles = {"peak_bytes": "peak", "joules": "energy"}
    return (
        (["", "pipeline, s", "denoiser, s", "CPU, s", "samples/s"], times),
        (["", "ratio", "CPU", "denoiser", "FLOPs", "computed", "held",
          *(titles[key] for key in further)], costs),
    )  # fmt: skip


def _further(row: Mapping[str, Any], key: str) -> str:
    if key not in row:  # peak memory of caches of other libraries is not measured
        return "n/a"
    return human(row[key], "B") if key == "peak_bytes" else f"{row[key]:.3g} J"


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3g} [{found['q1']:.3g}, {found['q3']:.3g}]"

"""The record of a run: one JSON file with everything that was measured and how to repeat it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from diffcache.attach.provenance import tables_of
from diffcache.eval.cost.interleave import too_fast
from diffcache.eval.metrics.definitions import METRICS
from diffcache.eval.metrics.pixels import ms_ssim_variant
from diffcache.eval.record import Setting, envelope
from diffcache.eval.report.record_files import SCHEMA, checked
from diffcache.eval.runs.evaluate import Run, lacking, step_flops
from diffcache.eval.runs.extractors import Extractors
from diffcache.eval.runs.folder import CaseFolder, evaluations, shares
from diffcache.eval.runs.task import Case, code_sha256, versions
from diffcache.eval.samples.prompts import HALF
from diffcache.features.base import Method
from diffcache.offline.calibrate import prompt_hash
from diffcache.pipelines.demo.saved import DTYPES

_ENOUGH = 2000


def row(run: Run, case: Case, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's row: its cost by count, its fidelity and its quality.

    The case is drawn completely; `measured` are its `fidelity`, `quality` and `samples`.
    """
    full = step_flops(run)
    lines = _lines(run, case)
    caches = [line["cache"] for line in lines if "cache" in line]
    uncached = run.drawer.full_steps(case.steps)
    took = uncached if case.method is None else evaluations(lines, case.steps, full)
    timeline = shares(lines)
    uncached_flops = None if full is None else full * run.drawer.steps
    return {
        "name": case.name,
        "kind": case.kind,
        "method": None if case.method is None else repr(case.method),
        "matches": list(case.matches),
        "steps": case.steps,
        "hash": case.digest(run.drawer.about),
        "folder": run.case_folder(case).path.relative_to(run.folder).as_posix(),
        "evaluations": took,
        "computed_steps": sum(s["computed"] for s in timeline) if timeline else float(case.steps),
        "flops": None if full is None else full * took,
        "flops_ratio": None if uncached_flops is None or not took else run.drawer.steps / took,
        "held_bytes": max((cache["held_bytes"] for cache in caches), default=0),
        "timeline": timeline,
        "latent_error": _latent_error(lines),
        **measured,
    }


def _lines(run: Run, case: Case) -> list[dict[str, Any]]:
    done = run.case_folder(case).done(run.batches)
    return [done[number] for number in sorted(done)]


def _latent_error(lines: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Return the mean over the kept samples, the first ones, for every step."""
    parts = [line["latent_error"] for line in lines if line.get("latent_error")]
    if not parts:
        return None
    return [fmean(value for part in parts for value in part[s]) for s in range(len(parts[0]))]


def assemble(
    run: Run, rows: Sequence[Mapping[str, Any]], timing: Mapping[str, Any], extractors: Extractors, first: Tensor
) -> dict[str, Any]:
    """Return the record.

    Values that depend on time or machine have keys of their own, so that the rest can be compared between runs. The
    uncached row comes first; `timing` has `rows` (row name -> seconds, ratio, throughput) and `warning`, and is empty
    if untimed; `first` is one of the samples, a picture [3, H, W] or a film [F, 3, H, W].
    """
    size = (first.shape[-2], first.shape[-1])
    task, drawer = run.plan.task, run.drawer
    drawn = {}  # seconds in the manifests, of all processes and earlier starts
    for this in rows:
        lines = CaseFolder(run.folder / this["folder"]).done(run.batches).values()
        drawn[f"{this['name']}: draw"] = round(float(sum(line["seconds"] for line in lines)), 3)
    setting = Setting(drawer.device, DTYPES[drawer.dtype])
    body = {
        "schema": SCHEMA,
        "seed": task.seed,
        "finished": True,
        "task": {
            "model": drawer.name,
            "model_sha256": drawer.about["model"],
            **({"loading": drawer.about["loading"]} if "loading" in drawer.about else {}),
            "pipeline": drawer.pipeline,
            "kind": "films" if first.ndim == 4 else "pictures",
            "prompts": {
                "source": drawer.prompts.source,
                "sha256": drawer.prompts.sha256,
                "count": len(drawer.prompts.texts),
                **({"rule": drawer.prompts.rule} if drawer.prompts.rule else {}),
            },
            "samples": task.samples,
            "seed": task.seed,
            "batch_size": task.batch_size,
            "steps": drawer.steps,
            "call": drawer.call,
            "dtype": drawer.dtype,
            "device": drawer.device.type,
            "threads": task.threads,
            "reference": reference_name(run),
            "code_sha256": code_sha256(),
            "versions": versions(),
        },
        "metrics": describe(rows, extractors, size),
        "rows": list(rows),
        "reference": None if run.real is None else run.real.describe(extractors),
        "missing": lacking(run, extractors),
        "warnings": warnings(run, rows, timing.get("rows", {})),
        "timing": {
            "parts_seconds": {**run.parts_seconds, **drawn},
            "rows": timing.get("rows", {}),
            "warning": timing.get("warning"),
        },
        "env": {"processes": run.ranks.count, "load": [round(value, 2) for value in os.getloadavg()]},
    }
    return checked(envelope("eval", setting, run.plan.command, body))


def reference_name(run: Run) -> str | None:
    """Return the reference of FID-lite: the real pictures' folder, or scenes of stickers."""
    if run.real is not None:
        side = "" if run.real.side is None else f" at {run.real.side} pixels"
        return f"{run.real.path.name}{side}"
    are_stickers = run.drawer.prompts.source in ("stickers", "sticker-films")
    return "held-out scenes of stickers" if are_stickers else None


def describe(rows: Sequence[Mapping[str, Any]], extractors: Extractors, size: tuple[int, int]) -> dict[str, Any]:
    """Return title, unit, direction and back end of every metric in the rows.

    `size` is height and width of a picture or frame; it decides the variant of MS-SSIM.
    """
    keys = dict.fromkeys(k for r in rows for part in ("fidelity", "quality") for k in r[part])
    found = {}
    for key in keys:
        base = key.removesuffix("_change")
        about = dict(extractors.describe(key))
        metric = METRICS.get(base)  # functions of the user's have a title alone, and are rewards
        title = about.pop("title", None) or METRICS[base].title
        found[key] = {
            "title": title + (", change" if key != base else ""),
            "unit": metric.unit if metric else "",
            "direction": metric.direction if metric else "up",
            **about,
        }
    if "ms_ssim" in found:
        found["ms_ssim"]["variant"] = ms_ssim_variant(*size)
    return found


def warnings(run: Run, rows: Sequence[Mapping[str, Any]], timed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the caveats of the numbers. `timed` is row name -> seconds and ratios; empty if untimed."""
    found = []
    count = run.plan.task.samples
    floors = [r["quality"].get(key, {}).get("floor") for r in rows for key in ("fid_lite", "fid")]
    floors = [floor for floor in floors if floor is not None]
    if floors and count < _ENOUGH:
        found.append(
            f"{count} samples: as many real ones would have an FID-lite of about {floors[0]:.2g}; "
            f"compare rows by their paired change, or draw {_ENOUGH:,}"
        )
    for this in rows:
        if this["kind"] == "method" and this["evaluations"] >= this["steps"]:
            found.append(f"{this['name']} skipped nothing: too strict settings, or too few steps")
    allowed = {this["name"]: this["flops_ratio"] for this in rows}
    return [*found, *too_fast(timed, allowed), *calibrated_on(run)]


def calibrated_on(run: Run) -> list[str]:
    """Return the caveats of methods whose tables were measured on prompts of this run."""
    drawn = {prompt_hash(text) for batch in run.batches for text in batch.prompts}
    found = []
    for name, method in run.plan.methods.items():
        tables = tables_of(method) if isinstance(method, Method) else []
        known = {one for entry in tables for one in entry.header.get("prompt_hashes", [])}
        if drawn & known:
            found.append(
                f"{name}: {len(drawn & known)} of the {len(drawn)} prompts are among those that "
                "its tables were calibrated on, so it may look better than it is; evaluate on "
                f"others, such as --prompts {HALF}FILE"
            )
    return found

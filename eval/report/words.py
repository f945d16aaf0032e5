"""Sentences of a report: the outcome, and how it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from diffcache.eval.report import record_files

LITE = (
    "“Lite” metrics are measured with a small network that is trained and shipped with diffcache. "
    "They tell rows of one table apart without a download; they are not comparable with published "
    "figures of the metric they are named after."
)
_LEADING = ("psnr_db", "lpips", "lpips_lite", "fid", "fid_lite", "fvd", "fvd_lite", "clip_score")


def summary(record: record_files.Record) -> list[str]:
    """Return the outcome: a sentence on the task, then on every method."""
    task = record["task"]
    count = f"{task.get('samples', '?')} {task.get('kind', 'samples')}"
    sentences = [f"{count} of {task.get('model', '?')} at {task.get('steps', '?')} steps."]
    rows = record_files.ordered(record)
    for row in rows:
        if row["kind"] == "method":
            sentences.append(_outcome(record, row))
            fewer = [r for r in rows if row["name"] in record_files.matches_of(r)]
            sentences += [_against(record, row, other) for other in fewer]
    return sentences


def _outcome(record: record_files.Record, row: dict[str, Any]) -> str:
    """Describe the savings and the cost of a method."""
    uncached = record_files.ordered(record)[0]
    parts = []
    calls, ratio = record_files.number(row.get("evaluations")), record_files.number(row.get("flops_ratio"))
    if calls is not None:
        parts.append(f"{calls:.4g} evaluations a sample")
    if ratio is not None:
        parts.append(f"FLOPs ratio {ratio:.3g}")
    speed = record_files.speed_of(record, row, "ratio")
    if speed is not None:
        parts.append(f"{speed.middle:.3g} times as fast")
    for column in record_files.columns_of(record):
        found = column.read(row)
        if column.key in _LEADING and found is not None:
            base = column.read(uncached)
            known = [v for v in (found, base) if v is not None]
            places = record_files.decimals(known)
            unit = f" {column.unit}" if column.unit else ""
            text = f"{column.title} {record_files.shown(found, column, places)}{unit}"
            if base is not None:
                text += f" ({record_files.shown(record_files.Value(base.middle), column, places)} uncached)"
            parts.append(text)
    return f"{row['name']}: {', '.join(parts) or 'nothing was measured'}."


def _against(record: record_files.Record, row: dict[str, Any], fewer: dict[str, Any]) -> str:
    """Return a sentence on the metrics in which a method beats uncached at fewer steps."""
    titles: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for key in record_files.metric_keys(record):
        known = record_files.describe(record, key)
        outcome = compare(record_files.metric_of(row, key), record_files.metric_of(fewer, key), known["direction"])
        if outcome is not None and not key.endswith(record_files.CHANGE):
            titles[outcome].append(str(known["title"]))
    heads = {1: "better in", -1: "worse in", 0: "intervals overlap in"}
    said = [f"{heads[way]} {', '.join(found)}" for way, found in titles.items() if found]
    text = "; ".join(said) or "no metric with an interval is held by both"
    return f"{row['name']} against {fewer['name']}: {text}."


def compare(one: record_files.Value | None, other: record_files.Value | None, direction: str | None) -> int | None:
    """Compare two numbers by their intervals.

    Returns:
        1 or -1 where the first is better or worse and the intervals do not overlap, 0 where they do, None where a
        number, an interval or a direction is missing.
    """
    if one is None or other is None or direction not in ("up", "down"):
        return None
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return None
    above = 1 if one.low > other.high else -1 if one.high < other.low else 0
    return above if direction == "up" else -above


def conditions(record: record_files.Record) -> str:
    """Return settings and machine of a table, in one line."""
    task, env = record["task"], record_files.environment(record)
    libraries = [f"{key} {env[key]}" for key in ("diffcache", "torch", "diffusers") if env.get(key)]
    threads = f"{env['threads']} threads" if env.get("threads") else ""
    steps = f"{task.get('steps', '?')} steps"
    what = _joined(f"{task.get('samples', '?')} {task.get('kind', 'samples')}", steps)
    on = _joined(task.get("dtype"), env.get("device"), threads, *libraries)
    command = f"; {record['command']}" if record.get("command") else ""
    return f"{task.get('model', 'model')}: {what}, {on}{command}."


def facts(record: record_files.Record) -> list[tuple[str, str]]:
    """Return how it was measured, as names and values."""
    task, env = record["task"], record_files.environment(record)
    timing = record.get("timing") or {}
    prompts = task.get("prompts") or {}
    count = f"{prompts['count']} texts" if prompts.get("count") else ""
    names = {"model", "model_sha256", "prompts", "versions", "kind", "samples"}
    found = [
        ("command", record.get("command")),
        ("model", _joined(task.get("model"), _digest(task.get("model_sha256")))),
        ("samples", _joined(task.get("samples"), task.get("kind"))),
        ("prompts", _joined(prompts.get("source"), count, _digest(prompts.get("sha256")))),
        *((key, value) for key, value in task.items() if key not in names),
        *((f"environment: {key}", value) for key, value in env.items()),
        *((f"seconds of {k}", v) for k, v in (timing.get("parts_seconds") or {}).items()),
    ]
    return [(name, _plain(value)) for name, value in found if value not in (None, "", {}, [])]


def methods(record: record_files.Record) -> list[tuple[str, str]]:
    """Return every row's settings: its method, or its steps."""
    rows = []
    for row in record_files.ordered(record):
        words = row.get("method") or f"uncached, {row.get('steps', '?')} steps"
        digest = f" · {row['hash']}" if row.get("hash") else ""
        rows.append((str(row["name"]), f"{words}{digest}"))
    return rows


def _digest(sha256: Any) -> str:
    return f"SHA-256 {str(sha256)[:16]}" if sha256 else ""


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items()) or "—"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return json.dumps(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)

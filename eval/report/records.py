"""Records of runs: read, checked, and put in the order of the table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = "diffcache.eval/1"
FILE = "record.json"
KINDS = ("uncached", "method", "fewer steps")

Record = dict[str, Any]


class Value(NamedTuple):
    """A number and, where known, the ends of its interval or its quartiles."""

    middle: float  # the number
    low: float | None = None  # lower end, or None
    high: float | None = None  # upper end, or None

    @property
    def arms(self) -> list[list[float]] | None:
        """Lengths of an error bar's two arms; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return [[max(self.middle - self.low, 0.0)], [max(self.high - self.middle, 0.0)]]


def load(path: Path) -> Record:
    """Read a record and check it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a record of this schema.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such record; give a run's folder or its {FILE}")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file ({error})") from error
    return checked(record, str(file))


def checked(record: Any, name: str = "record") -> Record:
    """Return a record that has all entries of a report.

    Raises:
        ValueError: If it has another schema, lacks a field, or its rows cannot be told apart.
    """
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{name}: schema={schema!r}: must be {SCHEMA!r}; run `diffcache eval`")
    for field, kind in (("task", dict), ("metrics", dict), ("rows", list)):
        if not isinstance(record.get(field), kind):
            raise ValueError(f"{name}: {field!r} is missing or not a {kind.__name__}")
    rows = record["rows"]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name}: every row must be an object with a name and a kind")
    for field in ("fidelity", "quality"):
        wrong = [row[field] for row in rows if not isinstance(row.get(field) or {}, dict)]
        if wrong:
            raise ValueError(f"{name}: {field}: {wrong[0]!r} must be an object")
    names = [row.get("name") for row in rows]
    if None in names or len(set(names)) < len(names):
        raise ValueError(f"{name}: rows must have names that differ, got {names}")
    strange = sorted({str(row.get("kind")) for row in rows} - set(KINDS))
    if strange:
        raise ValueError(f"{name}: rows of kind {', '.join(strange)}: must be of {KINDS}")
    if [row["kind"] for row in rows].count("uncached") != 1:
        raise ValueError(f"{name}: exactly one row must be of kind 'uncached'")
    _check_timing(record.get("timing") or {}, name)
    return dict(record)


def _check_timing(timing: Any, name: str) -> None:
    """Check that the times of rows are objects, as an evaluation writes them."""
    rows = (timing.get("rows") or {}) if isinstance(timing, dict) else timing
    known = rows.values() if isinstance(rows, dict) else [rows]
    wrong = [row for row in known if not isinstance(row, dict)]
    for row in known:
        if isinstance(row, dict):
            spans = [kept for key, kept in row.items() if key.endswith(("seconds", "ratio"))]
            wrong += [kept for kept in spans if kept is not None and not isinstance(kept, dict)]
    if wrong:
        raise ValueError(f"{name}: timing.rows: {wrong[0]!r} must be an object")


def ordered(record: Record) -> list[dict[str, Any]]:
    """Return the rows in the order of the table.

    Uncached first, then every method with its fewer-steps rows right under it, then fewer-steps
    rows that match none. A row that matches several methods stands under the last of them.
    """
    rows = record["rows"]
    methods = [row for row in rows if row["kind"] == "method"]
    under: dict[str, list[dict[str, Any]]] = {row["name"]: [] for row in methods}
    alone: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == "fewer steps":
            matched = [name for name in under if name in matches_of(row)]
            (under[matched[-1]] if matched else alone).append(row)
    found = [row for row in rows if row["kind"] == "uncached"]
    for method in methods:
        found += [method, *under[method["name"]]]
    return found + alone


def matches_of(row: dict[str, Any]) -> list[str]:
    """Return the names of the methods whose cost a row of fewer steps has."""
    given = row.get("matches") or []
    return [given] if isinstance(given, str) else [str(name) for name in given]


def timing_of(record: Record, name: str) -> dict[str, Any]:
    """Return the times of a row; empty where there are none."""
    rows = (record.get("timing") or {}).get("rows") or {}
    return dict(rows.get(name) or {})


def environment(record: Record) -> dict[str, Any]:
    """Return machine, versions and date of a record."""
    top = {key: record[key] for key in ("device", "threads", "commit", "date") if key in record}
    return {**record.get("versions", {}), **top, **(record.get("env") or {})}


def number(found: Any) -> float | None:
    """Return a finite number as a float, anything else as None."""
    right = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if right and math.isfinite(found) else None


def value(found: Any, keys: tuple[str, str, str] = ("value", "low", "high")) -> Value | None:
    """Read a number with its ends from a record; None where there is none."""
    if not isinstance(found, dict):
        plain = number(found)
        return None if plain is None else Value(plain)
    middle, low, high = (number(found.get(key)) for key in keys)
    return None if middle is None else Value(middle, low, high)


def metric_of(row: dict[str, Any], key: str) -> Value | None:
    """Return a metric of a row, from its fidelity or its quality."""
    found = (row.get("fidelity") or {}).get(key)
    return value((row.get("quality") or {}).get(key) if found is None else found)


def speed_of(record: Record, row: dict[str, Any], key: str) -> Value | None:
    """Return the median and quartiles of `seconds` or `ratio` of a row."""
    return value(timing_of(record, row["name"]).get(key), ("median", "q1", "q3"))

"""Read and check records of runs; order their rows as in the table, choose its columns, and format numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

SCHEMA = "diffcache.eval/1"
FILE = "record.json"
KINDS = ("uncached", "method", "fewer steps")

Record = dict[str, Any]


class Value(NamedTuple):
    """A number and, where known, the ends of its interval or its quartiles."""

    middle: float
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

    Raises FileNotFoundError if there is no such file, and ValueError if it is not a record of this schema.
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

    Raises ValueError if it has another schema, lacks a field, or its rows cannot be told apart.
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
    """Return the names of the methods that cost the same as a row of fewer steps."""
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
    """Return a finite number as a float, and None for anything else."""
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
    return value(_entry(row, key))


def _entry(row: dict[str, Any], key: str) -> Any:
    """Return what a row says of a metric, a number or a mapping; None if it says nothing."""
    found = (row.get("fidelity") or {}).get(key)
    return (row.get("quality") or {}).get(key) if found is None else found


def speed_of(record: Record, row: dict[str, Any], key: str) -> Value | None:
    """Return the median and quartiles of `seconds` or `ratio` of a row."""
    return value(timing_of(record, row["name"]).get(key), ("median", "q1", "q3"))


ARROWS = {"up": "↑", "down": "↓"}
CHANGE, TO_UNCACHED = "_change", "_to_uncached"
# Metrics are printed in this order, real and -lite alike; others follow in the record's order.
_ORDER = (
    "fid", "fvd", "psnr_db", "ssim", "ms_ssim", "lpips", "clip_score", "pick_score", "kid", "is",
    "precision", "recall", "density", "coverage",
)  # fmt: skip
_NAMES = {"db": "dB"}
_EXTRAS = ("p5", "p95", "pooled", "spread")
_MINUS = "\N{MINUS SIGN}"

Group = Literal["cost", "fidelity", "quality"]
Form = Literal["number", "change", "bytes"]


@dataclass(frozen=True)
class Column:
    """One column of numbers."""

    key: str  # its name in the CSV file
    title: str  # its name in print
    group: Group  # part of the table: `cost`, `fidelity` or `quality`
    direction: str | None  # "up" where more is better, "down" where less is, None where neither is
    # Range in brackets behind the number: "interval", "quartiles" or none
    brackets: Literal["interval", "quartiles", ""]
    form: Form  # form of a printed number: a plain number, a signed change, or bytes
    read: Callable[[dict[str, Any]], Value | None]  # returns the number of a row, or None
    unit: str = ""  # unit behind the title, or empty
    lite: bool = False  # whether an offline stand-in measured it

    @property
    def name(self) -> str:
        """Title, unit and arrow."""
        unit = f"({self.unit})" if self.unit else ""
        parts = (self.title, unit, ARROWS.get(self.direction or "", ""))
        return " ".join(part for part in parts if part)

    @property
    def spread(self) -> str:
        """Contents of the brackets behind its numbers; empty for none."""
        return {"interval": "[95 %]", "quartiles": "(quartiles)", "": ""}[self.brackets]

    @property
    def heading(self) -> str:
        """Name and brackets."""
        return f"{self.name} {self.spread}".strip()


def describe(record: Record, key: str) -> dict[str, Any]:
    """Return title, unit, direction and back end of a metric, also of one made from another.

    The key is a metric, its `_change`, or its distance `_to_uncached`.
    """
    known = record["metrics"].get(key)
    if known:
        return {"unit": "", "direction": None, "backend": ""} | dict(known)
    for ending, words in ((CHANGE, "change (paired)"), (TO_UNCACHED, "to uncached")):
        if key.endswith(ending):
            base = describe(record, key.removesuffix(ending))
            # A distance to the uncached set is better small whatever the metric's own direction.
            way = base["direction"] if ending == CHANGE else "down"
            return base | {"title": f"{base['title']} {words}", "direction": way}
    title = " ".join(_NAMES.get(word, word) for word in key.split("_"))
    return {"title": title, "unit": "", "direction": None, "backend": ""}


def metric_keys(record: Record) -> list[str]:
    """Return the metrics that some row holds, in the order of the table."""
    held: dict[str, None] = {}
    for row in record["rows"]:
        for part in ("fidelity", "quality"):
            held |= {key: None for key in row.get(part) or {} if metric_of(row, key)}
    listed = [*record["metrics"], *held]

    def place(key: str) -> tuple[int, int, str, int]:
        base = key.removesuffix(CHANGE).removesuffix(TO_UNCACHED)
        stem = base.removesuffix("_lite")
        ending = 2 * key.endswith(TO_UNCACHED) + key.endswith(CHANGE)
        rank = _ORDER.index(stem) if stem in _ORDER else len(_ORDER)
        return rank, listed.index(base) if base in listed else len(listed), base, ending

    return sorted(held, key=place)


def columns_of(record: Record) -> list[Column]:
    """Return the columns for which some row has a number: cost first, then the metrics."""
    columns = [*_cost(record), *(_metric(record, key) for key in metric_keys(record))]
    return [c for c in columns if any(c.read(row) is not None for row in record["rows"])]


def is_fidelity(record: Record, key: str) -> bool:
    """Return whether a metric compares with the uncached samples one by one."""
    return any(key in (row.get("fidelity") or {}) for row in record["rows"])


_COST = (
    ("evaluations", "Evaluations", None),
    ("flops_ratio", "FLOPs ratio", "up"),
    ("seconds", "Seconds", "down"),
    ("ratio", "Speed ratio", "up"),
    ("cpu_ratio", "CPU ratio", "up"),
    ("denoiser_ratio", "Denoiser ratio", "up"),
    ("throughput", "Samples a second", "up"),
    ("peak_bytes", "Peak", "down"),
    ("held_bytes", "Held", None),
)
_TIMED = ("seconds", "ratio", "cpu_ratio", "denoiser_ratio")


def _cost(record: Record) -> list[Column]:
    def read(row: dict[str, Any], key: str) -> Value | None:
        if key in _TIMED:
            return speed_of(record, row, key)
        source = timing_of(record, row["name"]) if key in ("peak_bytes", "throughput") else row
        return value(number(source.get(key)))

    columns = []
    for key, title, way in _COST:
        form: Form = "bytes" if key.endswith("_bytes") else "number"
        spread: Literal["quartiles", ""] = "quartiles" if key in _TIMED else ""
        columns.append(Column(key, title, "cost", way, spread, form, partial(read, key=key)))
    return columns


def _metric(record: Record, key: str) -> Column:
    known = describe(record, key)
    change = key.endswith(CHANGE)
    group: Group = "fidelity" if is_fidelity(record, key) else "quality"
    spread = any((v := metric_of(row, key)) and v.low is not None for row in record["rows"])
    return Column(
        key=key,
        title=str(known["title"]),
        group=group,
        # A change is better in the direction of its metric, which has the arrow and the best row already.
        direction=None if change else known["direction"],
        brackets="interval" if spread else "",
        form="change" if change else "number",
        read=partial(metric_of, key=key),
        unit=str(known["unit"] or ""),
        lite=known["backend"] == "lite",
    )


def decimals(values: Sequence[Value]) -> int:
    """Return the number of decimals for a column: enough for three digits, and one of the typical interval."""
    largest = max((abs(v.middle) for v in values), default=0.0)
    digits = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    halves = sorted((v.high - v.low) / 2 for v in values if v.low is not None and v.high is not None)
    halves = [half for half in halves if half > 0]
    if halves:
        digits = max(digits, -math.floor(math.log10(halves[len(halves) // 2])))
    return min(max(digits, 0), 5)


def shown(found: Value, column: Column, places: int) -> str:
    """Return a number of a column as text, with `places` decimals and its interval or quartiles."""
    if column.form == "bytes":
        return bytes_text(found.middle)
    sign = "+" if column.form == "change" else ""

    def text(one: float) -> str:
        # A rounded -0.00 would look like a change for the better.
        return f"{round(one, places) + 0.0:{sign}.{places}f}".replace("-", _MINUS)

    if found.low is None or found.high is None or not column.brackets:
        return text(found.middle)
    both = f"{text(found.low)}, {text(found.high)}"
    return f"{text(found.middle)} " + (f"[{both}]" if column.brackets == "interval" else f"({both})")


def bytes_text(count: float) -> str:
    """Return a number of bytes as text, in a readable unit."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or size == int(size) else f"{size:.1f} {unit}"


def flat(record: Record, row: dict[str, Any]) -> dict[str, Any]:
    """Return every number of a row under its own name, in full precision, for a CSV file."""
    cells: dict[str, Any] = {
        key: row.get(key)
        for key in ("name", "kind", "method", "steps", "matches", "hash", "evaluations",
                    "computed_steps", "flops", "flops_ratio", "held_bytes")
    }  # fmt: skip
    cells["matches"] = "; ".join(matches_of(row))
    timed = timing_of(record, row["name"])
    for key in ("seconds", "ratio", "cpu_ratio", "denoiser_ratio"):
        found = timed.get(key) or {}
        cells |= {f"{key}.{part}": found.get(part) for part in ("median", "q1", "q3", "n")}
    cells |= {key: timed.get(key) for key in ("throughput", "peak_bytes")}
    for key in metric_keys(record):
        found = _entry(row, key)
        whole = value(found)
        cells[key] = None if whole is None else whole.middle
        parts = found if isinstance(found, dict) else {}
        cells |= {f"{key}.{part}": parts.get(part) for part in ("low", "high", "n")}
        cells |= {f"{key}.{part}": parts[part] for part in _EXTRAS if part in parts}
    return cells

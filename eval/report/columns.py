"""The columns of a table: which a record holds, in which order, and how a number is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from diffcache.eval.report.records import Record, Value, matches_of, metric_of, number, speed_of, timing_of, value

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
    """Say whether a metric compares with the uncached samples one by one."""
    return any(key in (row.get("fidelity") or {}) for row in record["rows"])


def _cost(record: Record) -> list[Column]:
    def plain(row: dict[str, Any], key: str) -> Value | None:
        is_timed = key in ("peak_bytes", "throughput")
        source = timing_of(record, row["name"]) if is_timed else row
        found = number(source.get(key))
        return None if found is None else Value(found)

    def timed(row: dict[str, Any], key: str) -> Value | None:
        return speed_of(record, row, key)

    def column(key: str, title: str, direction: str | None, form: Form, unit: str = "") -> Column:
        is_timed = key == "seconds" or (key.endswith("ratio") and key != "flops_ratio")
        read = partial(timed if is_timed else plain, key=key)
        return Column(key, title, "cost", direction, "quartiles" if is_timed else "", form, read, unit)

    return [
        column("evaluations", "Evaluations", None, "number"),
        column("flops_ratio", "FLOPs ratio", "up", "number"),
        column("seconds", "Seconds", "down", "number"),
        column("ratio", "Speed ratio", "up", "number"),
        column("cpu_ratio", "CPU ratio", "up", "number"),
        column("denoiser_ratio", "Denoiser ratio", "up", "number"),
        column("throughput", "Samples a second", "up", "number"),
        column("peak_bytes", "Peak", "down", "bytes"),
        column("held_bytes", "Held", None, "bytes"),
    ]


def _metric(record: Record, key: str) -> Column:
    known = describe(record, key)
    change = key.endswith(CHANGE)
    group: Group = "fidelity" if is_fidelity(record, key) else "quality"
    spread = any((v := metric_of(row, key)) and v.low is not None for row in record["rows"])
    return Column(
        key=key,
        title=str(known["title"]),
        group=group,
        # The change goes the way of its metric; an arrow and a best of its own would say it twice.
        direction=None if change else known["direction"],
        brackets="interval" if spread else "",
        form="change" if change else "number",
        read=partial(metric_of, key=key),
        unit=str(known["unit"] or ""),
        lite=known["backend"] == "lite",
    )


def decimals(values: Sequence[Value]) -> int:
    """Return how many decimals a column needs: three digits, and one of the typical interval."""
    largest = max((abs(v.middle) for v in values), default=0.0)
    digits = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    halves = sorted((v.high - v.low) / 2 for v in values if v.low is not None and v.high is not None)
    halves = [half for half in halves if half > 0]
    if halves:
        digits = max(digits, -math.floor(math.log10(halves[len(halves) // 2])))
    return min(max(digits, 0), 5)


def shown(found: Value, column: Column, places: int) -> str:
    """Print a number of a column with its interval or quartiles."""
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
    """Print a number of bytes in the unit that keeps it readable."""
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
        found = (row.get("fidelity") or {}).get(key) or (row.get("quality") or {}).get(key)
        whole = value(found)
        cells[key] = None if whole is None else whole.middle
        parts = found if isinstance(found, dict) else {}
        cells |= {f"{key}.{part}": parts.get(part) for part in ("low", "high", "n")}
        cells |= {f"{key}.{part}": parts[part] for part in _EXTRAS if part in parts}
    return cells

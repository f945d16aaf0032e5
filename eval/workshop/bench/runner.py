"""Benchmarks: their sizes, their records, tables of them, and steps that repeat by thirds."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from diffcache.eval.cost.interleave import Call, Turn
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.record import Setting, envelope

MOST = 44  # characters of a cell


@dataclass(frozen=True)
class Bench:
    """A benchmark: what it measures, and with what sizes."""

    # Takes the setting and, by name, sizes: also `rounds` if there are any, and `unfinished`, a file that keeps what
    # is done, if it takes hours. Returns the body of the record: `shapes`, `rounds`, `rows` with names, and more.
    measure: Callable[..., dict[str, Any]]
    about: str  # purpose, for the command line
    quick: Mapping[str, Any]  # sizes of a run that only shows that it works
    sizes: Mapping[str, Any] = field(default_factory=dict)  # sizes that belong to it, whatever is asked for
    needs_gpu: bool = False  # whether a run on a CPU says nothing, so that its record is no lasting one

    def takes(self, size: str) -> bool:
        """Return whether it takes a size of a name."""
        return size in inspect.signature(self.measure).parameters

    def run(self, name: str, setting: Setting, sizes: Mapping[str, Any], unfinished: Path) -> dict[str, Any]:
        """Measure with sizes that are asked for; return the record, which names no command yet."""
        told: dict[str, Any] = {"unfinished": unfinished} if self.takes("unfinished") else {}
        started = time.monotonic()
        body = self.measure(setting, **{**self.sizes, **sizes}, **told)
        body["seconds"] = round(time.monotonic() - started, 1)
        return envelope(name, setting, "", body)


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for every list of named rows in a record, a column for each thing said."""
    for key, rows in record.items():
        if isinstance(rows, list) and rows and all("name" in row for row in rows):
            columns = list(dict.fromkeys(column for row in rows for column in row))
            table = Table(*columns, title=f"{record['benchmark']}: {key}")
            for row in rows:
                table.add_row(*(cell(row.get(column)) for column in columns))
            yield table


def cell(value: Any) -> str:
    """Return a value of a row as text: a number with its quartiles or interval, in short."""
    if isinstance(value, Mapping):
        for middle, low, high in (("median", "q1", "q3"), ("value", "low", "high")):
            if {middle, low, high} <= set(value):
                return f"{cell(value[middle])} [{cell(value[low])}, {cell(value[high])}]"
        text = ", ".join(f"{name} {cell(inner)}" for name, inner in value.items())
    elif isinstance(value, list):
        text = ", ".join(map(cell, value))
    elif isinstance(value, float):
        text = f"{value:,.4g}"
    else:
        text = "" if value is None else f"{value:,}" if type(value) is int else str(value)
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."


def by_thirds(
    steps: Mapping[str, Call | Turn], held: Mapping[str, Callable[[], int]], rounds: int, setting: Setting
) -> dict[str, dict[str, Any]]:
    """Take steps in turn, at least 3 of each, and return the `thirds` of all but the first.

    The first is a yardstick that never changes; of the others `held` returns the bytes held now.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    nbytes: dict[str, list[int]] = {name: [] for name in held}
    third = rounds // 3
    for count in (third, third, rounds - 2 * third):
        clock = take_turns(steps, count, 0, setting).own(setting)
        for name in steps:
            seconds[name] += clock[name]
        for name, weigh in held.items():
            nbytes[name].append(weigh())
    alone = seconds[next(iter(steps))]
    return {name: thirds(seconds[name], alone, nbytes[name]) for name in held}


def thirds(seconds: Sequence[float], alone: Sequence[float], held: Sequence[int]) -> dict[str, Any]:
    """Return the time of a step in each third, and how the last third compares with the middle.

    Given are seconds of every step, those of a yardstick in the same turns, and bytes after each third.
    Returned are `ms`, medians by thirds; `of_alone`, the same in multiples of the yardstick; `time_ratio`
    and `bytes_ratio`, last third over middle third; `bytes`.
    """
    third = len(seconds) // 3
    parts = [slice(third), slice(third, 2 * third), slice(2 * third, None)]
    shares = [own / other for own, other in zip(seconds, alone, strict=True)]
    of_alone = [median(shares[part]) for part in parts]
    return {
        "ms": [1e3 * median(seconds[part]) for part in parts],
        "of_alone": of_alone,
        "time_ratio": of_alone[2] / of_alone[1],
        "bytes": list(held),
        "bytes_ratio": held[2] / held[1],
    }

"""Benchmarks: their sizes, their records, tables of them, and steps that repeat by thirds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from diffcache.eval.record import Setting, envelope

MOST = 44  # characters of a cell


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        measure: Returns the body of the record: `shapes`, `rounds`, `rows` with names, and more.
            Takes the setting, and by name the sizes that it is asked for.
        about: Purpose, for the command line.
        quick: Sizes of a run that only shows that it works.
        sizes: Sizes that belong to it, whatever is asked for.
        has_rounds: Whether it is asked for a number of rounds.
        needs_gpu: Whether a run on a CPU says nothing, so that its record is no lasting one.
        resumes: Whether it takes hours, and keeps what is done in a file, `unfinished`.
        sized: Whether it takes what the command line says of layers, prompt and recipes.
    """

    measure: Callable[..., dict[str, Any]]
    about: str
    quick: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    has_rounds: bool = True
    needs_gpu: bool = False
    resumes: bool = False
    sized: bool = False

    def run(self, name: str, setting: Setting, sizes: Mapping[str, Any], unfinished: Path) -> dict[str, Any]:
        """Measure; return the record, which names no command yet.

        Args:
            name: Name of the benchmark.
            setting: Device and dtype, and where the progress is told.
            sizes: Sizes that it is asked for.
            unfinished: File of what is done of a long one.
        """
        told: dict[str, Any] = {"unfinished": unfinished} if self.resumes else {}
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


def thirds(seconds: Sequence[float], alone: Sequence[float], held: Sequence[int]) -> dict[str, Any]:
    """Return the time of a step in each third, and how the last third compares with the middle.

    Args:
        seconds: Seconds of every step.
        alone: Seconds of a yardstick that never changes, measured in the same turns.
        held: Bytes after each third.

    Returns:
        `ms`, medians by thirds; `of_alone`, the same in multiples of the yardstick; `time_ratio`
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

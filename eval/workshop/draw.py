"""Draw published numbers as a stranger would, and make them again.

    python -m diffcache.eval.workshop.draw --seed 1 --count 20

A record is drawn, then a row of it, then one of its numbers; 5 % of the samples are made again. A
number that needs a GPU, hours or another machine is said to be so, and is not counted as right.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer

from diffcache.command import FAILED, Seed, fail, script
from diffcache.eval.pages import table
from diffcache.eval.record import Row
from diffcache.eval.workshop.again import NOT_MADE, Made, again_of, share_of
from diffcache.eval.workshop.figures import file_of
from diffcache.eval.workshop.records import Share, names
from diffcache.pipelines.demo.console import quiet

TITLES = ("record", "row", "number", "published", "same samples", "now", "verdict", "CPU s")
# Numbers of a row that are published and made again, besides those under `quality`.
KEYS = (
    "psnr_db",
    "whole_right",
    "whole",
    "perplexity",
    "taken",
    "exact_match",
    "success_rate",
)


@dataclass(frozen=True)
class Number:
    """A published number.

    Attributes:
        record: Name of the record.
        row: Row of the record.
        key: Name of the number in it; empty where no part of the record is made again.
    """

    record: str
    row: Row
    key: str


def keys_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the numbers of a row that can be made again."""
    values = row.get("values")
    kept = [key for key in values if key != "mse"] if isinstance(values, dict) else []
    groups = [row, row.get("fidelity") or {}, row.get("quality") or {}]
    named = [key for group in groups for key, value in group.items()
             if key == "strayed" or (key in KEYS and isinstance(value, Mapping))]  # fmt: skip
    return list(dict.fromkeys([*kept, *named])) if row.get("kind") != "fewer steps" else []


def pool() -> dict[str, list[Number]]:
    """Return all published numbers, by record."""
    found: dict[str, list[Number]] = {name: [Number(name, {}, "")] for name in NOT_MADE}
    for name in names():
        record = json.loads(file_of(name).read_text(encoding="utf-8"))
        rows = record.get("rows") or [{"name": record["benchmark"], "psnr_db": {}}]
        numbers = [Number(name, row, key) for row in rows for key in keys_of(row)]
        found[name] = numbers
    return {name: numbers for name, numbers in sorted(found.items()) if numbers}


def drawn(seed: int, count: int) -> list[Number]:
    """Draw different numbers."""
    rng, everything = np.random.default_rng(seed), pool()
    chosen: list[Number] = []
    while len(chosen) < count:
        numbers = everything[str(rng.choice(list(everything)))]
        number = numbers[int(rng.integers(len(numbers)))]
        if number not in chosen:
            chosen.append(number)
    return chosen


def remade(number: Number, share: float | None, seed: int) -> Made | None:
    """Make a part of a number's samples again; None where the row no longer has it."""
    again = again_of(number.record)
    assert again is not None
    record = json.loads(file_of(number.record).read_text(encoding="utf-8"))
    share = share_of(number.record) if share is None else share
    made = {one.key: one for one in again(record, [number.row], share, seed)}
    return made.get(number.key)


def line(number: Number, made: Made | None, seconds: float) -> list[str]:
    """Return the cells of a number."""
    if not number.key:
        return [number.record, "", "", "", "", "", NOT_MADE[number.record], ""]
    name = str(number.row["name"])
    about = [number.record, name if len(name) <= 44 else f"{name[:41]}...", number.key]
    if made is None:
        return [*about, "", "", "", "gone", f"{seconds:.0f}"]
    low, high = made.interval
    kept = "" if made.kept is None else f"{made.kept.double().mean():.4g}"
    said = made.published
    ends = f" ({said['low']:.4g} to {said['high']:.4g})" if "low" in said else ""
    now = f"{made.now.double().mean():.4g} ({low:.4g} to {high:.4g}), n {len(made.now)}"
    inside = "NO" if not made.is_inside else "same" if made.kept is not None else "inside"
    return [*about, f"{said['value']:.4g}{ends}", kept, now, inside, f"{seconds:.0f}"]


def lines(seed: int, count: int, share: float | None) -> Iterator[list[str]]:
    """Yield the cells of every drawn number, as it is made."""
    for number in drawn(seed, count):
        started = time.process_time()
        made = remade(number, share, seed) if number.key else None
        yield line(number, made, time.process_time() - started)


def draw(
    seed: Seed = 0, count: Annotated[int, typer.Option(min=1)] = 20, share: Share = None
) -> None:
    """Draw published numbers, and make them again."""
    quiet()
    torch.set_num_threads(1)
    found = []
    for cells in lines(seed, count, share):
        found.append(cells)
        print("\n".join(table(TITLES, found)[0 if len(found) == 1 else -1 :]), flush=True)
    verdicts = [cells[6] for cells in found]
    right = sum(verdict in ("same", "inside") for verdict in verdicts)
    wrong = sum(verdict in ("NO", "gone") for verdict in verdicts)
    print(f"\nseed {seed}: {right} of {count} inside, {wrong} not, "
          f"{count - right - wrong} not made again here", flush=True)  # fmt: skip
    if wrong:
        fail(f"{wrong} of {count} numbers are no longer made", FAILED, "")


main = script(draw)

if __name__ == "__main__":
    sys.exit(main())

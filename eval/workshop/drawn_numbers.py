"""Draw published numbers as a stranger would, and make them again.

    python -m diffcache.eval.workshop.drawn_numbers --seed 1 --count 20
    python -m diffcache.eval.workshop.drawn_numbers --list             # what can be drawn, and what cannot

A record is drawn, then a row of it, then one of its numbers; a part of the samples is made again
(`again.py`). A number that keeps a value for each sample must have the same values; one that keeps
an interval must lie in that of the part. What is no number of its own is left out for a reason that
`REST` gives: times and hardware, counts that tests hold, differences and parts of what is drawn.
Records of times alone (`again.NOT_MADE`) have nothing to draw.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Annotated, Any

import numpy as np
import torch
import typer

from diffcache.command import FAILED, MISSING, Seed, fail, script, warn
from diffcache.errors import MissingError
from diffcache.eval.pages import table
from diffcache.eval.record import Row
from diffcache.eval.workshop.again import METHOD, NOT_MADE, WEAK, Made, again_of, share_of
from diffcache.eval.workshop.bench.search import is_made
from diffcache.eval.workshop.figures import file_of
from diffcache.eval.workshop.records import Share, names
from diffcache.pipelines.demo.console import quiet

TITLES = ("record", "row", "number", "published", "same samples", "now", "verdict", "CPU s")
# Numbers that are made again.
KEYS = (
    "psnr_db", "whole_right", "whole", "perplexity", "taken", "exact_match", "answers",
    "success_rate", "reward_right", "reward_films_right", "touched", "token_right", "frame_right", "first_right",
    "second_right", "target_right", "untouched_psnr_db", "autoencoder_untouched_psnr_db", "strayed",
    "right_after_a_second",
)  # fmt: skip
KEPT = ("values", "hits", "outcomes", "each", "chosen")  # of a row: values of its samples
HERE = "not here"
PLAIN = ("strayed", "psnr_db")  # of them, those that some record gives without an interval
TIME, COUNT = "a time, of its machine", "bytes and counts, which follow from shapes and schedules"
OF_ALL = "a number of all samples together, or against those of another row: hours"
DERIVED = "a part of, or a difference between, outcomes that are drawn"
# Pattern of another number -> why it is not made again.
REST: Mapping[str, str] = {
    "*seconds*": TIME, "*faster": TIME, "*_ms": TIME, "*_us*": TIME, "*ratio": TIME,
    "of_alone": TIME, "sites": COUNT, "cost": COUNT, "missed": TIME, "*target*_share": TIME,
    "*forwards": COUNT, "rows": COUNT, "*token_layers": COUNT, "*bytes*": COUNT, "share*": COUNT, "slots": COUNT,
    "read": COUNT, "computed*": COUNT, "evaluations": COUNT, "flops*": COUNT, "moved": COUNT,
    "*change": DERIVED, "lookup": DERIVED, "copy": DERIVED, "kinds.*": DERIVED, "aware": DERIVED,
    "needle_by_depth": DERIVED, "nats": DERIVED, "right_*": DERIVED, "target_right_*": DERIVED,
    "likeness": DERIVED, "strayed_of_other": DERIVED, "chosen.*": DERIVED, "tuned_more": DERIVED,
    "fid_*": OF_ALL, "kid_*": OF_ALL, "precision_*": OF_ALL, "recall_*": OF_ALL,
    "density_*": OF_ALL, "coverage_*": OF_ALL, "latent_error": OF_ALL, "action_error": OF_ALL,
    "ssim": OF_ALL, "ms_ssim": OF_ALL, "lpips_*": OF_ALL, "perplexity": OF_ALL, "of_*": OF_ALL,
    "fvd_*": OF_ALL, "temporal_error": OF_ALL, "right": OF_ALL, "late": OF_ALL, "drift": OF_ALL,
    "motion": OF_ALL, "static": OF_ALL, "chunk.*": TIME,
}  # fmt: skip
SETTINGS = ("steps", "samples*", "chunks", "tokens", "facts", "factor", "threshold", "psnr",
            "confidence", "seen", "draws", "low", "high", "*target*", "settings.*",
            "is_lite")  # fmt: skip
FEWER = "fewer steps"  # rows that are drawn beside methods, whose steps of a part may be others


@dataclass(frozen=True)
class Number:
    """A published number.

    Attributes:
        record: Name of the record.
        row: Row of the record.
        key: Name of the number in it.
    """

    record: str
    row: Row
    key: str


def numbers_of(row: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names of the numbers of a row, and whether each can be drawn.

    Raises:
        ValueError: If one can be neither drawn nor left out for a reason.
    """
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("fidelity", "quality"):
            found.update(value)
        elif key in ("values", "each"):  # of single samples: what the others are made of
            continue
        elif isinstance(value, Mapping) and not {"value", "median"} & set(value):
            found.update({f"{key}.{inner}": one for inner, one in value.items()})
        else:
            found[key] = value
    told = {}
    for key, value in found.items():
        if not _is_number(value) or any(fnmatch(key, pattern) for pattern in SETTINGS):
            continue
        told[key] = _can_draw(row, key, value)
        if key not in KEYS and not any(fnmatch(key, pattern) for pattern in REST):
            raise ValueError(f"{row['name']}: {key} is neither drawn nor left out for a reason")
    return told


def _can_draw(row: Mapping[str, Any], key: str, value: Any) -> bool:
    if key not in KEYS or row.get("kind") == FEWER:
        return False
    if "tuned_more" in row:
        return key == "psnr_db" and is_made(row)
    if "chunks" in row:  # a part is the beginning of every film
        return key == "right_after_a_second" or (key == "frame_right" and "values" in row)
    return isinstance(value, Mapping) or key in PLAIN


def _is_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool({"value", "median"} & set(value))
    if isinstance(value, list):
        return bool(value) and _is_number(value[0])
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def pool() -> dict[str, list[Number]]:
    """Return all numbers that can be drawn, by record."""
    found: dict[str, list[Number]] = {}
    for name in names():
        record = json.loads(file_of(name).read_text(encoding="utf-8"))
        rows = record.get("rows") or [{"name": METHOD, "psnr_db": record["psnr_db"]}]
        found[name] = [Number(name, row, key) for row in rows for key, can in numbers_of(row).items() if can]
    return found


def is_weak(number: Number) -> bool:
    """Return whether a number is tested by its interval alone: it has no values, and is neither all nor none."""
    if any(key in number.row for key in KEPT) or number.key == "right_after_a_second":
        return False
    groups = [number.row, number.row.get("fidelity") or {}, number.row.get("quality") or {}]
    (published,) = [group[number.key] for group in groups if number.key in group]
    return not (isinstance(published, Mapping) and published["value"] in (0, 1))


def drawn(seed: int, count: int) -> list[Number]:
    """Draw different numbers.

    Raises:
        ValueError: If there are fewer.
    """
    rng, everything = np.random.default_rng(seed), pool()
    if count > (known := sum(map(len, everything.values()))):
        raise ValueError(f"count={count}: must be at most {known}, as there are no more numbers")
    chosen: list[Number] = []
    while len(chosen) < count:
        numbers = everything[str(rng.choice(list(everything)))]
        number = numbers[int(rng.integers(len(numbers)))]
        if number not in chosen:
            chosen.append(number)
    return chosen


def remade(number: Number, share: float | None, seed: int) -> Made | None:
    """Make a part of a number's samples again; None where the row no longer has it."""
    share = share_of(number.record) if share is None else share
    return _made(number.record, number.row["name"], share, seed).get(number.key)


@cache
def _made(name: str, row: str, share: float, seed: int) -> dict[str, Made]:
    """Make all numbers of a row again."""
    again = again_of(name)
    assert again is not None
    record = json.loads(file_of(name).read_text(encoding="utf-8"))
    rows = [one for one in record.get("rows") or [{"name": METHOD}] if one["name"] == row]
    return {one.key: one for one in again(record, rows, share, seed)}


def line(number: Number, made: Made | None, seconds: float) -> list[str]:
    """Return the cells of a number."""
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
        try:
            made = remade(number, share, seed)
        except MissingError as error:  # weights that are fetched
            warn(str(error))
            yield [number.record, str(number.row["name"])[:44], number.key, "", "", "", HERE, ""]
            continue
        yield line(number, made, time.process_time() - started)


def draw(
    seed: Seed = 0,
    count: Annotated[int, typer.Option(min=1, help="Numbers.")] = 20,
    share: Share = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what can be drawn.")] = False,
) -> None:
    """Draw published numbers, and make them again."""
    quiet()
    if listed:
        rows = [[name, str(len(numbers)), WEAK.get(name, "")] for name, numbers in pool().items()]
        rows += [[name, "0", f"not made again: {why}"] for name, why in NOT_MADE.items()]
        titles = ("record", "numbers", "all values, where none are kept")
        print("\n".join(table(titles, rows)), "\n")
        print("\n".join(table(("other numbers", "why they are not made again"), REST.items())))
        return
    torch.set_num_threads(1)
    found = []
    for cells in lines(seed, count, share):
        found.append(cells)
        print("\n".join(table(TITLES, found)[0 if len(found) == 1 else -1 :]), flush=True)
    wrong = sum(cells[6] in ("NO", "gone") for cells in found)
    same, here = (sum(cells[6] == word for cells in found) for word in ("same", HERE))
    told = f"{same} of them value by value, {wrong} not, {here} could not be made here"
    print(f"\nseed {seed}: {count - wrong - here} of {count} inside, {told}", flush=True)
    print(f"of times alone, not drawn: {', '.join(NOT_MADE)}", flush=True)
    if wrong:
        fail(f"{wrong} of {count} numbers are no longer made", FAILED, "")
    if here:
        fail(f"{here} of {count} numbers could not be made here", MISSING, "")


main = script(draw)

if __name__ == "__main__":
    sys.exit(main())

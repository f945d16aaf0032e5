"""Many recipes at many budgets: a TOML file in, a record out.

context = 513
budgets = [0.5, 0.25, 0.125, 0.0625]

[family.eviction]
recipes = ["snapkv:budget={}", "keydiff:budget={}"]     # {} takes each budget in turn
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffcache.eval.kv.recall import DTYPES, KVTask, Progress, measure
from diffcache.eval.kv.tables import weights_digest
from diffcache.eval.kv.words import NONE, parse_row
from diffcache.eval.record import ROOT, Setting, check, envelope
from diffcache.eval.runs.sweep import read_values
from diffcache.files import read_json, write_json

BENCHMARK = "kv-recall"
_TASK = {field.name for field in dataclasses.fields(KVTask)}


@dataclasses.dataclass(frozen=True)
class RecipeSweep:
    """Recipes to measure on one task."""

    task: KVTask  # task that every recipe is measured on
    families: Mapping[str, list[str]]  # words of recipes, by what they have in common

    def words(self) -> list[str]:
        """Return all words once, the uncompressed cache first."""
        return list(dict.fromkeys([NONE, *(w for words in self.families.values() for w in words)]))


def read_sweep(file: Path) -> RecipeSweep:
    """Read a sweep.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a key or a recipe in it is wrong.
    """
    found = read_values(file)
    budgets, families = found.pop("budgets", []), found.pop("family", {})
    unknown = sorted(set(found) - _TASK)
    if unknown:
        known = ", ".join(sorted(_TASK | {"budgets", "family"}))
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; use {known}")
    if not families:
        raise ValueError(f"{file}: [family.NAME] with recipes = [...] is missing")
    spelled = {}
    for name, family in families.items():
        spelled[name] = [
            text.replace("{}", repr(budget))
            for text in family.get("recipes", [])
            for budget in (budgets if "{}" in text else [None])
        ]
        for word in spelled[name]:
            parse_row(word)
    return RecipeSweep(KVTask(**found), spelled)


def run(sweep: RecipeSweep, out: Path | None = None, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Measure every recipe of a sweep, those that `out` holds already excepted.

    The record `out` is written after every row, so that a run that was cut off goes on. Rows are kept while
    neither the task nor the code of caches has changed.
    """
    rows = rows_before(out, fingerprint(sweep.task))
    weights = weights_digest(sweep.task.directory)
    wanted_rows = {word: parse_row(word, weights) for word in sweep.words() if word not in rows}
    model = sweep.task.load()
    for word in sweep.words():
        if word not in rows:
            row = measure(model, wanted_rows[word], sweep.task, progress)
            rows[word] = {**row, "name": word}
            if out is not None:
                write_record(list(rows.values()), sweep.task, out)
    wanted = [rows[word] for word in sweep.words()]
    if out is not None:
        write_record(wanted, sweep.task, out, sweep.families)
    return wanted


def write_record(
    rows: list[dict[str, Any]], task: KVTask, out: Path, families: Mapping[str, list[str]] | None = None
) -> None:
    """Write what was measured, and with what."""
    setting = Setting(torch.device("cpu"), DTYPES[task.dtype])
    shapes, seconds = dataclasses.asdict(task), sum(row["seconds"]["all"] for row in rows)
    body = {"shapes": {"device": "cpu", **shapes}, "rounds": 1, "seed": task.seed}
    body |= {"seconds": seconds, "rows": rows}
    body |= {"fingerprint": fingerprint(task), "families": dict(families or {})}
    write_rows(BENCHMARK, setting, body, out)


def write_rows(benchmark: str, setting: Setting, body: dict[str, Any], out: Path, *libraries: str) -> None:
    """Write the record of a command.

    `body` has at least `shapes`, `rounds`, `seconds`, `rows` and `seed`; versions of `libraries` count, too.
    """
    record = envelope(benchmark, setting, shlex.join(["diffcache", *sys.argv[1:]]), body)
    record["versions"] |= {name: importlib.metadata.version(name) for name in libraries}
    check(record)
    write_json(out, record)


def rows_before(out: Path | None, key: str | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a record by their words, none of one with another `fingerprint`."""
    record = None if out is None else read_json(out)
    if record is None or record.get("fingerprint") != key:
        return {}
    return {row["name"]: row for row in record["rows"]}


def fingerprint(task: object) -> str:
    """Return a digest of a task, by its `repr`, and of the code of caches."""
    found = hashlib.sha256(repr(task).encode())
    for file in sorted((ROOT / "diffcache" / "kv").rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]

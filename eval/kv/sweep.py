"""Many recipes at many budgets: a TOML file in, a record and a plot out.

context = 513
budgets = [0.5, 0.25, 0.125, 0.0625]

[family.eviction]
recipes = ["snapkv:budget={}", "keydiff:budget={}"]     # {} takes each budget in turn
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import re
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
from diffcache.eval.report.palette import GREY, MARKERS, OKABE_ITO, new_figure, styled
from diffcache.eval.runs.sweep import read_values
from diffcache.files import read_json, write_json

BENCHMARK = "kv-recall"
# Settings that say how much is held, and not how.
_AMOUNT = re.compile(
    r",?(?<=[:,])(budget|bits|rank|value_rank|sparsity|wide|value_bits|steps)=(\([^)]*\)|[^,|]*)"
    r"|#\d+"
)
_BUDGET = re.compile(r",?(?<=[:,])budget=[^,|]*")
_TASK = {field.name for field in dataclasses.fields(KVTask)}


@dataclasses.dataclass(frozen=True)
class RecipeSweep:
    """Recipes to measure on one task.

    Attributes:
        task: Task that every recipe is measured on.
        families: Words of recipes, by what they have in common.
    """

    task: KVTask
    families: Mapping[str, list[str]]

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


def run(
    sweep: RecipeSweep,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure every recipe of a sweep, those that `out` holds already excepted.

    Args:
        sweep: Sweep to measure.
        out: JSON file of the record; written after every row, so that a run that was cut off goes
            on. Rows are kept while neither the task nor the code of caches has changed.
        progress: Callback for the progress of a recipe.
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
    rows: list[dict[str, Any]],
    task: KVTask,
    out: Path,
    families: Mapping[str, list[str]] | None = None,
) -> None:
    """Write what was measured, and with what."""
    setting = Setting(torch.device("cpu"), DTYPES[task.dtype])
    shapes, seconds = dataclasses.asdict(task), sum(row["seconds"]["all"] for row in rows)
    body = {"shapes": {"device": "cpu", **shapes}, "rounds": 1, "seed": task.seed}
    body |= {"seconds": seconds, "rows": rows}
    body |= {"fingerprint": fingerprint(task), "families": dict(families or {})}
    write_rows(BENCHMARK, setting, body, out)


def write_rows(
    benchmark: str, setting: Setting, body: dict[str, Any], out: Path, *libraries: str
) -> None:
    """Write the record of a command.

    Args:
        benchmark: Name of the benchmark.
        setting: Device and dtype.
        body: At least `shapes`, `rounds`, `seconds`, `rows` and `seed`.
        out: JSON file.
        libraries: More packages whose versions count.
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


@styled
def draw(record: Mapping[str, Any], picture: Path) -> None:
    """Draw whole answers against the bytes held, one panel for each family.

    Args:
        record: Record that `run` writes.
        picture: PNG file.
    """
    rows = {row["name"]: row for row in record["rows"]}
    families = {name: words for name, words in record["families"].items() if words}
    columns = min(3, len(families))
    lines = -(-len(families) // columns)
    size = 5.2 * columns, 5.0 * lines
    figure, axes = new_figure(*size, columns, lines, sharex=True, sharey=True)
    for axis, (family, words) in zip(axes, families.items(), strict=False):
        reads = all(rows[word]["read"] < 1 for word in words)
        axis.axhline(rows[NONE]["whole"]["value"], color=GREY, linewidth=1, linestyle="--")
        for number, (name, held) in enumerate(_lines(words, rows).items()):
            points = sorted((row["read" if reads else "share"], *_ends(row)) for row in held)
            x, y, below, above = zip(*points, strict=True)
            marker, color = MARKERS[number % len(MARKERS)], OKABE_ITO[number % len(OKABE_ITO)]
            line = {"marker": marker, "markersize": 4, "linewidth": 1, "color": color}
            axis.errorbar(x, y, [below, above], label=name, **line)
        axis.set_title(family + (": slots read" if reads else ""))
        axis.set_xscale("log", base=2)
        axis.set_ylim(-0.03, 1.03)
        axis.legend(fontsize=6, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.06))
    for axis in axes[len(families) :]:
        axis.set_visible(False)
    figure.supxlabel("bytes held, share of an exact cache (or slots read)")
    figure.supylabel("whole answers right, share with 95 % interval (dashed: nothing dropped)")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def _ends(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the whole answers of a row, and how far its interval reaches below and above."""
    whole = row["whole"]
    return whole["value"], whole["value"] - whole["low"], whole["high"] - whole["value"]


def _lines(
    words: list[str], rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of recipes that differ in how much they hold only, by a short name."""
    kinds: dict[str, list[str]] = {}
    for word in words:
        kinds.setdefault(_kind(word), []).append(word)
    shorts = ["|".join(part.split(":")[0] for part in kind.split("|")) for kind in kinds]
    found = {}
    for kind, short in zip(kinds, shorts, strict=True):
        name = short if shorts.count(short) == 1 else kind
        found[name] = [rows[word] for word in kinds[kind]]
    return found


def _kind(word: str) -> str:
    """Return a word without how much is held; of several joined, without budgets."""
    amount = _BUDGET if "|" in word else _AMOUNT
    parts = [amount.sub("", part).replace(":,", ":").rstrip(":") for part in word.split("|")]
    return "|".join(parts)

"""`docs/methods.md`: every method, from its docstring, the models it runs on and its figures."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcache.catalog import METHODS, method_class
from diffcache.eval.runs.folder import write_file
from diffcache.features.base import FeatureMethod
from diffcache.features.collect import Calibrated
from diffcache.pipelines.zoo.families import FAMILIES, KINDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/methods.md")
RECORDS = "eval-*.json"
# title, where the value lies in a row of a record, how it is written
FIGURES = (
    ("evaluations", ("evaluations",), "{:.1f}"),
    ("FLOPs ratio", ("flops_ratio",), "{:.2f}"),
    ("PSNR dB", ("fidelity", "psnr_db"), "{:.1f}"),
    ("SSIM", ("fidelity", "ssim"), "{:.4f}"),
    ("LPIPS-lite", ("fidelity", "lpips_lite"), "{:.4f}"),
    ("FID-lite change", ("quality", "fid_lite_change"), "{:+.3f}"),
    ("prompt accuracy", ("quality", "prompt_accuracy"), "{:.4f}"),
    ("bytes held", ("held_bytes",), "{:,.0f}"),
)
HEAD = """# Methods

Every method of the catalogue: what it does, where it comes from, its settings, where it differs
from its source, what it ran on, and what it measured. Written by `python -m
diffcache.eval.method_page --write` from the docstrings, the table of tested models and the records
in `assets/bench/`; a test holds it to them.

Use any of them by name, `diffcache.wrap(pipe, "taylorseer", every=5)`, as a class, or on the
command line, `--method taylorseer --set every=5`. Those marked *calibrated* need tables that are
measured on the model first: `diffcache.calibrate(pipe, method, prompts)` or `diffcache calibrate`.
`diffcache.tune` chooses among methods and settings. Every method can hold its features as bf16,
int8 or on the host: `hold="int8"`.
"""


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: Of the project, for its records.
    """
    records = _records(directory / "assets" / "bench")
    parts = [HEAD, _overview(), *[_section(name, records) for name in METHODS]]
    return "\n".join(parts).rstrip() + "\n"


def _overview() -> str:
    rows = ["| method | what it does | calibrated |", "|---|---|---|"]
    for name in METHODS:
        cls = method_class(name)
        needs = "yes" if issubclass(cls, Calibrated) else ""
        rows.append(f"| [`{name}`](#{name}) | {_summary(cls)} | {needs} |")
    return "\n".join(rows) + "\n"


def _section(name: str, records: list[dict[str, Any]]) -> str:
    cls = method_class(name)
    lines = [f"## {name}", "", f"`diffcache.features.{_module(cls)}:{cls.__name__}`", ""]
    lines += [_story(cls), ""]
    if cls.source:
        lines += [f"Source: {cls.source}.", ""]
    settings = _settings(cls)
    if settings:
        lines += ["| setting | default | meaning |", "|---|---|---|", *settings, ""]
    if name in FAMILIES:
        kinds = "; ".join(KINDS[pipeline] for pipeline in FAMILIES[name].pipelines)
        lines += [f"Run by the tests on: {kinds}.", ""]
    figures = _figures(name, records)
    if figures:
        titles = ["model", "settings", *(title for title, _, _ in FIGURES)]
        lines += ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *figures, ""]
    if cls.bibtex:
        lines += ["```bibtex", cls.bibtex, "```", ""]
    return "\n".join(lines)


def _module(cls: type[FeatureMethod]) -> str:
    return cls.__module__.rpartition(".")[2]


def _summary(cls: type[FeatureMethod]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0].rstrip(".")


def _story(cls: type[FeatureMethod]) -> str:
    """Return the docstring up to its first section, paragraphs on one line each."""
    text = re.split(r"\n(?:Args|Attributes|Raises|Example):\n", _doc(cls))[0]
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def _doc(cls: type[FeatureMethod]) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _settings(cls: type[FeatureMethod]) -> list[str]:
    """Return a row for every setting, with what the docstring says of it."""
    match = re.search(r"\nArgs:\n(.*?)(?=\n\S|\Z)", _doc(cls), re.DOTALL)
    said: dict[str, str] = {}
    current = ""
    for line in (match.group(1) if match else "").splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            current = entry.group(1)
            said[current] = entry.group(2)
        elif current and line.strip():
            said[current] += " " + line.strip()
    rows = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has = field.default is not dataclasses.MISSING
        default = f"`{field.default!r}`" if has else "required"
        rows.append(f"| `{field.name}` | {default} | {_cell(said.get(field.name, ''))} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(RECORDS))]


def _figures(name: str, records: list[dict[str, Any]]) -> list[str]:
    """Return a row for every record's row of a method."""
    found = []
    for record in records:
        for row in record["rows"]:
            called = str(row["name"]).partition(":")[0]
            if row["kind"] != "method" or called != name:
                continue
            samples = record["task"]["samples"]
            model = f"{Path(record['task']['model']).name}, {row['steps']} steps, {samples} samples"
            values = [_figure(row, place, form) for _, place, form in FIGURES]
            cells = [model, f"`{row['name'].partition(':')[2] or 'defaults'}`", *values]
            found.append("| " + " | ".join(map(_cell, cells)) + " |")
    return found


def _figure(row: dict[str, Any], place: tuple[str, ...], form: str) -> str:
    """Return one value of a row with the bounds of its interval, an empty cell without one."""
    value: Any = row
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, dict):
        text = form.format(value["value"])
        if value.get("low") is not None:
            text += f" ({form.format(value['low'])} to {form.format(value['high'])})"
        return text
    return form.format(value) if isinstance(value, (int, float)) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check that it is up to date; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m diffcache.eval.method_page")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="exit with 1 if it is out of date")
    what.add_argument("--write", action="store_true", help="write it")
    given = parser.parse_args(arguments)
    wanted = page()
    if given.write:
        write_file(given.page, wanted)
        return 0
    if not given.page.exists() or given.page.read_text(encoding="utf-8") != wanted:
        print(f"{given.page}: out of date; run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

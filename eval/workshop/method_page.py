"""`docs/methods.md` behind its introduction: every method, from its row and docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.pages import cell, entries, keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.eval.report.record_files import timing_of
from diffcache.features.collect import Calibrated
from diffcache.files import read_json
from diffcache.registry import MODELS, Row, rows_of

PAGE = Path("docs/methods.md")
RECORDS = "eval-*.json"
# title -> what is written of a row of a record, with its fidelity and quality
FIGURES = (
    ("evaluations", "{evaluations:.1f}"),
    ("FLOPs ratio", "{flops_ratio:.2f}"),
    ("seconds ratio", "{seconds_ratio:.2f}"),
    ("PSNR dB", "{psnr_db:.1f}"),
    ("SSIM", "{ssim:.4f}"),
    ("LPIPS-lite", "{lpips_lite:.4f}"),
    ("FID-lite change", "{fid_lite_change:+.3f}"),
    ("whole scenes right", "{whole_right:.3f}"),
    ("its change", "{whole_right_change:+.3f}"),
    ("success rate", "{success_rate:.3f}"),
    ("its change", "{success_rate_change:+.3f}"),
    ("action error", "{action_error:.2g}"),
    ("bytes held", "{held_bytes:,.0f}"),
)
_NOTHING: dict[str, Any] = dict.fromkeys(re.findall(r"{(\w+)", str(FIGURES)))


def page(directory: Path = ROOT) -> str:
    """Return the whole page: a head, written by hand before its table, and a section a method.

    Args:
        directory: The project, for its records.
    """
    file, first = directory / PAGE, _overview()
    head = file.read_text(encoding="utf-8").partition(first[0])[0] if file.exists() else ""
    folder = directory / "assets" / "bench"
    records = [read_json(file) for file in sorted(folder.glob(RECORDS))]
    sections = [_section(row, records) for row in rows_of("method").values()]
    return "\n".join([head + "\n".join([*first, ""]), *sections]).rstrip() + "\n"


def _overview() -> list[str]:
    lines: list[str] = []
    listed = rows_of("method").values()
    for family in dict.fromkeys(row.family for row in listed):
        rows = []
        for row in listed:
            if row.family == family:
                marked = " (*calibrated*)" if issubclass(row.load(), Calibrated) else ""
                rows.append([f"[`{row.name}`](#{row.name}){marked}", row.sentence.rstrip(".")])
        lines += [f"**{family}**", "", *(f"- {name}: {said}" for name, said in rows), ""]
    return lines[:-1]


def _section(row: Row, records: list[dict[str, Any]]) -> str:
    ran = [MODELS.get(each, each) for each in row.tried]
    lines = [section(row, "##"), f"Run by the tests on: {'; '.join(ran)}.", ""]
    lines += _measured(row.name, records)
    if row.load().bibtex:
        lines += ["```bibtex", row.load().bibtex, "```", ""]
    return "\n".join(lines)


def section(row: Row, depth: str = "###") -> str:
    """Return what the registry and the docstring say of a method or policy.

    Args:
        row: Its row.
        depth: Signs before the heading.
    """
    cls = row.load()
    lines = [f"{depth} {row.name}", "", f"`{row.place}`", "", story(cls), ""]
    lines += [f"Source: {row.paper}.", ""] if row.paper else []
    known = settings(cls)
    lines += [*entries(["setting", "default", "meaning"], known), ""] if known else []
    return "\n".join(lines)


def behind_policies(file: Path, kind: str, measured: str) -> str:
    """Return a page of policies: its introduction as it stands, their sections, and what was measured.

    Args:
        file: The page; what stands before its policies is written by hand.
        kind: Kind of their rows in the registry.
        measured: Markdown.
    """
    introduction, head, _ = file.read_text(encoding="utf-8").partition("## Policies\n")
    return "\n".join([introduction + head, *map(section, rows_of(kind).values()), measured]).rstrip() + "\n"


def marked(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a record in which the names of controls are in italics."""
    return [{**row, "name": f"*{row['name']}*" if row["role"] == "control" else row["name"]} for row in rows]


def story(cls: type) -> str:
    """Return the docstring up to its first section, paragraphs and entries on one line each."""
    text = re.split(r"\n(?:Args|Attributes|Raises|Example):\n", _doc(cls))[0]
    parts = re.split(r"(\n\n(?:- )?|\n- )", text.strip())  # every second one is a break
    return "".join(part if place % 2 else " ".join(part.split()) for place, part in enumerate(parts))


def _doc(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def settings(cls: type) -> list[list[str]]:
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
    for field in dataclasses.fields(cls):
        default = "required"
        if field.default is not dataclasses.MISSING:
            default = f"`{field.default!r}`"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory()!r}`"
        rows.append([f"`{field.name}`", default, said.get(field.name, "")])
    return rows


def _measured(name: str, records: list[dict[str, Any]]) -> list[str]:
    """Return the table of every record's row of a method; columns without a number are left out."""
    rows = []
    for record in records:
        for row in record["rows"]:
            called, _, settings = str(row["name"]).partition(":")
            if row["kind"] != "method" or called != name:
                continue
            task = record["task"]
            shown = _NOTHING | row | row["fidelity"] | row["quality"]
            shown["seconds_ratio"] = timing_of(record, row["name"]).get("ratio")
            values = [cell(form, shown) for _, form in FIGURES]
            about = f"{Path(task['model']).name}, {row['steps']} steps, {task['samples']} samples"
            rows.append([about, f"`{settings or 'defaults'}`", *values])
    if not rows:
        return []
    titles = ["model", "settings", *(title for title, _ in FIGURES)]
    held = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    return [*table([titles[at] for at in held], ([row[at] for at in held] for row in rows)), ""]


main = keep_pages(lambda before: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())

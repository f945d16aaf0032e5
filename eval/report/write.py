"""Files of a report: tables, plots, and one page from the templates beside this file.

The HTML file needs nothing else: no script to read it, no network.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcache.eval.pages import environment
from diffcache.eval.report import plots, words
from diffcache.eval.report.records import Record, checked, differing, join
from diffcache.eval.report.section import Picture, Section, picture_of, section_of
from diffcache.eval.report.table import DAGGER, WARNING, markdown, to_csv
from diffcache.files import write_file

FORMATS = ("md", "html", "csv")
FOLDER = "report"
_PNG_WIDTH = slice(16, 20)  # where a PNG says it
_SCALE = 0.8  # of plots on the page: they are of different widths, and their letters of one size


def write_report(
    record: dict[str, Any], folder: Path, out: Path | None = None, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write the report of one run, in its folder where no other is named; see `write_reports`."""
    return write_reports([(record, folder)], out or folder / FOLDER, formats)


def write_reports(
    runs: Sequence[tuple[dict[str, Any], Path]],
    out: Path,
    formats: Sequence[str] = FORMATS,
    in_one: bool = False,
) -> list[Path]:
    """Write one report about runs: tables, plots, sheets of samples and a page.

    Runs of the same task also get plots of all their rows together. The same records and samples
    give the same bytes.

    Args:
        runs: Records, as in `record.json`, with the folders where their samples are.
        out: Folder to write to.
        formats: Formats, some of `md`, `html` and `csv`; plots and sheets come with the first two.
        in_one: Put the rows of all runs, which are of the same task, in one table.

    Returns:
        The files.

    Raises:
        ValueError: If there is no run, a record or a format is not one, or runs whose rows go in
            one table are of different models or tasks.
    """
    wrong = [name for name in formats if name not in FORMATS]
    if wrong or not formats:
        raise ValueError(f"formats={list(formats)}: must be of {', '.join(FORMATS)}")
    if not runs:
        raise ValueError("runs=[]: there must be at least one")
    records = [checked(record, f"run {place + 1}") for place, (record, _) in enumerate(runs)]
    folders = [[folder] for _, folder in runs]
    if in_one:
        records, folders = [join(records)], [[folder for _, folder in runs]]
    prefixes = [f"{place + 1}-" for place in range(len(records))] if len(records) > 1 else [""]
    files: dict[str, str | bytes] = {}
    if "csv" in formats:
        pairs = zip(prefixes, records, strict=True)
        files |= {f"{prefix}table.csv": to_csv(record) for prefix, record in pairs}
    if {"md", "html"} & set(formats):
        sections = list(map(section_of, records, folders, prefixes))
        files |= _pages(sections, *_joint(records), formats)
    for name, data in files.items():
        write_file(out / name, data)
    return [out / name for name in files]


def _joint(records: Sequence[Record]) -> tuple[list[Picture], list[str]]:
    """Draw the plots of all records together, or say why there are none."""
    if len(records) < 2:
        return [], []
    fields = differing(records)
    if fields:
        return [], [f"No plot of all runs together: they differ in {', '.join(fields)}."]
    try:
        record = join(records)
    except ValueError as error:
        return [], [f"No plot of all runs together: {error}."]
    drawn, missing = plots.draw_pareto(record)
    return [picture_of(plot, "joint-") for plot in drawn], missing


def _pages(
    sections: Sequence[Section], joint: Sequence[Picture], notes: Sequence[str],
    formats: Sequence[str],
) -> dict[str, str | bytes]:  # fmt: skip
    """Return the page, the Markdown file, and the pictures that it shows."""
    count = len(sections)
    title = sections[0].title if count == 1 else f"{count} runs, with and without cache"
    files: dict[str, str | bytes] = {}
    pictures = [*joint, *(p for one in sections for p in (*one.plots, *one.sheets))]
    for picture in pictures:
        files[f"{picture.stem}.png"] = picture.png
        if picture.svg is not None:
            files[f"{picture.stem}.svg"] = picture.svg
    for kind in ("md", "html"):
        if kind in formats:
            files[f"report.{kind}"] = _render(kind, title, sections, joint, notes)
    return files


def _render(
    kind: str, title: str, sections: Sequence[Section], joint: Sequence[Picture],
    notes: Sequence[str],
) -> str:  # fmt: skip
    """Return a page.

    Args:
        kind: `html`, or `md` for Markdown, which shows pictures by the names of their files.
        title: Title of the page.
        sections: One for each record.
        joint: Plots of all records together.
        notes: Sentences at the top.
    """
    used = {
        "words": words, "DAGGER": DAGGER, "WARNING": WARNING, "data": _data, "width": _width,
        "halves": _halves, "warnings": _warnings, "markdown": markdown,
    }  # fmt: skip
    page = environment().get_template(f"report/page.{kind}.jinja", globals=used)
    text: str = page.render(title=title, sections=sections, joint=joint, notes=notes)
    return text


def _warnings(record: dict[str, Any]) -> list[str]:
    unfinished = [] if record.get("finished", True) else ["The run is not finished."]
    return unfinished + [str(text) for text in record.get("warnings") or []]


def _halves(text: str) -> list[str]:
    """Return the number of a cell, and what stands in brackets behind it."""
    number, *spread = re.split(r" (?=[\[(])", text, maxsplit=1)
    return [number, *(spread or [""])]


def _width(png: bytes) -> int:
    return round(_SCALE * int.from_bytes(png[_PNG_WIDTH], "big"))


def _data(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

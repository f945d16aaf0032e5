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
from diffcache.eval.report import plots, strips, words
from diffcache.eval.report.record_files import Record, checked, ordered
from diffcache.eval.report.strips import Samples
from diffcache.eval.report.table import DAGGER, WARNING, markdown, table_of, to_csv
from diffcache.files import write_file

FORMATS = ("md", "html", "csv")
FOLDER = "report"
_PNG_WIDTH = slice(16, 20)  # where a PNG says it
_SCALE = 0.8  # scale of all plots on the page, so that letters have one size in plots of different widths
_FILMS, _FILM_ROWS, _FILM_BYTES = 2, 7, 12 << 20


def write_report(
    record: dict[str, Any], folder: Path, out: Path | None = None, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write the report of a run: tables, plots, sheets of samples and a page; return the files.

    The same record and samples give the same bytes. Samples are in `folder`; `out` of None is a folder in it. Formats
    are some of `md`, `html` and `csv`; plots and sheets come with the first two.

    Raises:
        ValueError: If the record or a format is invalid.
    """
    wrong = [name for name in formats if name not in FORMATS]
    if wrong or not formats:
        raise ValueError(f"formats={list(formats)}: must be of {', '.join(FORMATS)}")
    record, out = checked(record), out or folder / FOLDER
    files: dict[str, str | bytes] = {}
    if "csv" in formats:
        files["table.csv"] = to_csv(record)
    if {"md", "html"} & set(formats):
        files |= _pages(record, folder, formats)
    for name, data in files.items():
        write_file(out / name, data)
    return [out / name for name in files]


def _pages(record: Record, folder: Path, formats: Sequence[str]) -> dict[str, str | bytes]:
    """Return the page, the Markdown file, and the pictures that it shows."""
    drawn, left_out = plots.draw(record)
    sheets, missing = strips.draw(record, [folder])
    files: dict[str, str | bytes] = {}
    for picture in (*drawn, *sheets):
        files[f"{picture.stem}.png"] = picture.png
        if picture.svg is not None:
            files[f"{picture.stem}.svg"] = picture.svg
    task = record["task"]
    count, kind = task.get("samples", "?"), task.get("kind", "samples")
    given = {
        "title": f"{task.get('model', 'model')}: {count} {kind}, with and without cache",
        "record": record,
        "table": table_of(record),
        "plots": drawn,
        "sheets": sheets,
        "films": _films(record, folder),
        "left_out": [*left_out, *missing],
    }
    used = {
        "words": words,
        "DAGGER": DAGGER,
        "WARNING": WARNING,
        "data": _data,
        "width": _width,
        "halves": _halves,
        "markdown": markdown,
    }
    for ending in ("md", "html"):
        if ending in formats:
            page = environment().get_template(f"report/page.{ending}.jinja", globals=used)
            files[f"report.{ending}"] = page.render(**given)
    return files


def _films(record: Record, folder: Path) -> list[tuple[str, bytes]]:
    """Return captions and small films of the worst samples, as many as a page can carry."""
    if record["task"].get("kind") != "films":
        return []
    rows = [row for row in ordered(record) if row["kind"] != "fewer steps"][:_FILM_ROWS]
    samples = Samples([folder])
    found, total = [], 0
    for number, _ in strips.picks(rows[1:], "worst", _FILMS):
        for row in rows:
            data = samples.preview(row, number)
            if data is not None and total + len(data) <= _FILM_BYTES:
                total += len(data)
                found.append((f"{row['name']}, sample {number}", data))
    return found


def _halves(text: str) -> list[str]:
    """Return the number in a cell, and the text in brackets behind it."""
    number, *spread = re.split(r" (?=[\[(])", text, maxsplit=1)
    return [number, *(spread or [""])]


def _width(png: bytes) -> int:
    return round(_SCALE * int.from_bytes(png[_PNG_WIDTH], "big"))


def _data(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

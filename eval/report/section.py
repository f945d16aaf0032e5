"""Section of a report about one record: its table, plots, sheets and films."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcache.eval.report import plots, strips
from diffcache.eval.report.palette import images
from diffcache.eval.report.records import Record, ordered
from diffcache.eval.report.samples import Samples
from diffcache.eval.report.table import Table, table_of

_FILMS, _FILM_ROWS, _FILM_BYTES = 2, 7, 12 << 20


@dataclass(frozen=True)
class Picture:
    """A plot or a sheet, ready to be written.

    Attributes:
        stem: Name of its files, without the ending.
        title: Title above it.
        caption: Caption that tells what it shows.
        png: The file.
        svg: The file, or None for a sheet.
        lines: More text under it, one line each.
    """

    stem: str
    title: str
    caption: str
    png: bytes
    svg: bytes | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """All that a report says about one record.

    Attributes:
        title: Title above it.
        record: The record.
        table: Its table.
        plots: Its plots.
        sheets: Pictures of its samples.
        films: Caption and bytes of small films.
        left_out: One sentence for everything that is not there.
    """

    title: str
    record: Record
    table: Table
    plots: tuple[Picture, ...] = ()
    sheets: tuple[Picture, ...] = ()
    films: tuple[tuple[str, bytes], ...] = ()
    left_out: tuple[str, ...] = ()


def section_of(record: Record, folders: Sequence[Path], prefix: str = "") -> Section:
    """Draw everything that a report shows of a record.

    Args:
        record: A checked record.
        folders: Folders of the runs whose samples it is about.
        prefix: Prefix of the files' names.
    """
    drawn, left_out = plots.draw(record)
    sheets, missing = strips.draw(record, folders)
    return Section(
        title=title_of(record),
        record=record,
        table=table_of(record),
        plots=tuple(picture_of(plot, prefix) for plot in drawn),
        sheets=tuple(_sheet(sheet, prefix) for sheet in sheets),
        films=tuple(_films(record, folders)),
        left_out=(*left_out, *missing),
    )


def title_of(record: Record) -> str:
    """Return the title of a record's report."""
    task = record["task"]
    kind = task.get("kind", "samples")
    return (
        f"{task.get('model', 'model')}: {task.get('samples', '?')} {kind}, with and without cache"
    )


def picture_of(plot: plots.Plot, prefix: str = "") -> Picture:
    """Return a plot with its files."""
    made = images(plot.figure)
    return Picture(prefix + plot.stem, plot.title, plot.caption, made["png"], made["svg"])


def _sheet(sheet: strips.Sheet, prefix: str) -> Picture:
    target = io.BytesIO()
    sheet.image.save(target, "png", optimize=True)
    caption = "Uncached, every method, and below it the difference five times as strong."
    if sheet.films:
        caption = "Frames of every film, uncached first."
    return Picture(prefix + sheet.stem, sheet.title, caption, target.getvalue(), None, sheet.lines)


def _films(record: Record, folders: Sequence[Path]) -> list[tuple[str, bytes]]:
    """Return small films of the worst samples, as many as a page can carry."""
    if record["task"].get("kind") != "films":
        return []
    rows: list[dict[str, Any]] = [row for row in ordered(record) if row["kind"] != "fewer steps"]
    rows = rows[:_FILM_ROWS]
    samples = Samples(folders)
    found, total = [], 0
    for number, _ in strips.picks(rows[1:], "worst", _FILMS):
        for row in rows:
            data = samples.preview(row, number)
            if data is not None and total + len(data) <= _FILM_BYTES:
                total += len(data)
                found.append((f"{row['name']}, sample {number}", data))
    return found

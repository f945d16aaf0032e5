"""From records to the files of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcache.eval.report import page, plots
from diffcache.eval.report.records import Record, checked, differing, join
from diffcache.eval.report.section import Picture, Section, picture_of, section_of
from diffcache.eval.report.table import to_csv
from diffcache.files import write_file

FORMATS = ("md", "html", "csv")
FOLDER = "report"


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
            files[f"report.{kind}"] = page.render(kind, title, sections, joint, notes)
    return files

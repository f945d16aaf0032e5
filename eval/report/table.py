"""The table of a record: as Markdown, as CSV and for the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffcache.eval.metrics.intervals import is_wilson
from diffcache.eval.pages import escape_markdown
from diffcache.eval.pages import table as lines_of
from diffcache.eval.report import record_files

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

NONE, NOT_MEASURED, DAGGER, UNDER = "—", "n/a", "†", "↳ "
WARNING = "Warning: "
_MOST_NAME = 30
LEAST_SAVED = 1.05  # ratio of operations
_LONGEST_LIST = 60  # characters of the methods that a row of fewer steps is for
_FOLDERS = re.compile(r"=[^,=]*/")  # of a file in a setting


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str  # text as printed, without signs of emphasis
    bold: bool = False  # whether it is the best of its column but for the uncached row
    dagger: bool = False  # whether the interval of a change holds 0
    number: float | None = None  # number to sort by, or None


@dataclass(frozen=True)
class Row:
    """One row."""

    name: str
    kind: str  # "uncached", "method" or "fewer steps"
    label: str  # the name as printed
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A record's table."""

    columns: tuple[record_files.Column, ...]  # columns but the first, which names the row
    rows: tuple[Row, ...]  # rows in the order of the table
    notes: tuple[str, ...]  # notes on the signs and on the back ends that measured, and the record's warnings


def table_of(record: record_files.Record, only: Sequence[str] | None = None) -> Table:
    """Build the table of a record.

    `only` are keys of the columns to show, in this order; keys that the record lacks are ignored. None shows all.
    """
    columns = record_files.columns_of(record)
    if only is not None:
        known = {column.key: column for column in columns}
        columns = [known[key] for key in only if key in known]
    rows = record_files.ordered(record)
    ranks = [_cells(column, rows) for column in columns]
    named = tuple(
        Row(row["name"], row["kind"], _label(row), tuple(cells[place] for cells in ranks))
        for place, row in enumerate(rows)
    )
    return Table(tuple(columns), named, tuple(notes_of(record, columns)))


def _label(row: dict[str, Any]) -> str:
    """Return a row's name, without the folders of files in it.

    A row of fewer steps is marked, and has the names of its methods if they are several and short.
    """
    if row["kind"] != "fewer steps":
        return _FOLDERS.sub("=", row["name"])
    methods = [_FOLDERS.sub("=", name) for name in record_files.matches_of(row)]
    several = ", ".join(methods)
    if len(several) > _LONGEST_LIST:
        several = f"{len(methods)} rows"
    return f"{UNDER}{row['name']}" + (f" (for {several})" if len(methods) > 1 else "")


def _cells(column: record_files.Column, rows: Sequence[dict[str, Any]]) -> list[Cell]:
    values = [column.read(row) for row in rows]
    found = [v for v in values if v is not None]
    places = record_files.decimals(found)
    best = _best(column, rows, values)
    cells = []
    for row, one in zip(rows, values, strict=True):
        if one is None:
            reference = row["kind"] == "uncached" and column.group != "cost"
            cells.append(Cell(NONE if reference else NOT_MEASURED))
            continue
        low, high = one.low, one.high
        holds_zero = low is not None and high is not None and low <= 0 <= high
        unsure = column.form == "change" and holds_zero
        cells.append(
            Cell(
                record_files.shown(one, column, places),
                best is not None and one.middle == best and is_rival(row),
                unsure,
                one.middle,
            )
        )
    return cells


def _best(
    column: record_files.Column, rows: Sequence[dict[str, Any]], values: Sequence[record_files.Value | None]
) -> float | None:
    """Return the best number of rows that saved something; None where there is no choice."""
    pairs = zip(rows, values, strict=True)
    rivals = [v.middle for row, v in pairs if v is not None and is_rival(row)]
    if column.direction not in ("up", "down") or len(set(rivals)) < 2:
        return None
    return max(rivals) if column.direction == "up" else min(rivals)


def is_rival(row: dict[str, Any]) -> bool:
    """Return whether a row may be the best; one that skips next to nothing may not, as it is close to uncached."""
    return row["kind"] != "uncached" and (row.get("flops_ratio") or LEAST_SAVED) >= LEAST_SAVED


def notes_of(record: record_files.Record, columns: Sequence[record_files.Column]) -> list[str]:
    """Return the footnotes of a table: signs, back ends, warnings."""
    shown_keys = {column.key for column in columns}
    idle = [row for row in record["rows"] if row["kind"] != "uncached" and not is_rival(row)]
    but = "uncached and rows that skip less than 5 %" if idle else "uncached"
    notes = [f"↑ more is better, ↓ less is better; bold: the best but for {but}."]
    notes += _intervals(record, [column for column in columns if column.brackets == "interval"])
    if any(column.form == "change" for column in columns):
        notes.append(
            "change (paired): to uncached, the same samples drawn for both; "
            f"{DAGGER}: its interval holds 0, so no change is shown at this number of samples."
        )
    if "evaluations" in shown_keys:
        notes.append("Evaluations: denoiser calls of a full run that cost the same FLOPs.")
    if any(row["kind"] == "fewer steps" for row in record["rows"]):
        notes.append(f"{UNDER.strip()} uncached at fewer steps, at about the cost of the method above it.")
    notes += _back_ends(record, shown_keys)
    if not record.get("finished", True):
        notes.append(f"{WARNING}the run is not finished; these numbers will change.")
    return notes + [f"{WARNING}{text}" for text in record.get("warnings") or []]


def _intervals(record: record_files.Record, columns: Sequence[record_files.Column]) -> list[str]:
    """Return notes on the kinds of intervals in the columns; a record holds only their ends."""
    drawn = {key for row in record["rows"] for key in row.get("outcomes") or {}}
    found: dict[str, list[str]] = {}
    for column in columns:
        values = [v for v in map(column.read, record["rows"]) if v and v.low is not None]
        if column.form == "change" and column.key.removesuffix(record_files.CHANGE) in drawn:
            kind = "Bonett and Price's interval of paired shares"
        elif all(is_wilson(*v) for v in values):
            kind = "Wilson's interval of shares"
        else:
            kind = "bootstrap interval"
        found.setdefault(kind, []).append(column.title)
    if len(found) < 2:
        return [f"[95 %]: {kind} over the samples." for kind in found]
    kinds = "; ".join(f"{kind} ({', '.join(titles)})" for kind, titles in found.items())
    return [f"[95 %] over the samples: {kinds}."]


def _back_ends(record: record_files.Record, shown_keys: set[str]) -> list[str]:
    """Return a note for every back end on the metrics that it measured."""
    held: dict[tuple[str, str, str], list[str]] = {}
    for key in record_files.metric_keys(record):
        if key not in shown_keys or key.endswith(record_files.CHANGE):
            continue
        known = record_files.describe(record, key)
        which = (known["backend"], known.get("extractor") or "", known.get("sha256") or "")
        held.setdefault(which, []).append(str(known["title"]))
    notes = []
    for (backend, extractor, sha256), titles in held.items():
        words = f"{extractor} {sha256[:12]}".strip()
        detail = f"{backend or 'not named'}{f' ({words})' if words else ''}"
        warning = "; stand-ins, not comparable with published figures" if backend == "lite" else ""
        notes.append(f"Back end of {', '.join(titles)}: {detail}{warning}.")
    for key in sorted(shown_keys & set(record["metrics"])):
        variant = record["metrics"][key].get("variant")
        if variant:
            notes.append(f"{record['metrics'][key]['title']}: {variant}.")
    return notes


def markdown(table: Table) -> str:
    """Return the table and its footnotes as Markdown."""
    heads = ["Config", *(column.heading for column in table.columns)]
    rows = [[escape_markdown(row.label), *map(_marked, row.cells)] for row in table.rows]
    lines = lines_of(list(map(escape_markdown, heads)), rows, numbers=True)
    lines += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _marked(cell: Cell) -> str:
    text = escape_markdown(cell.text) + (DAGGER if cell.dagger else "")
    return f"**{text}**" if cell.bold else text


def to_csv(record: record_files.Record) -> str:
    """Return every number of a record in full precision, one line for each row."""
    rows = [record_files.flat(record, row) for row in record_files.ordered(record)]
    heads = list(dict.fromkeys(key for row in rows for key in row))
    # A method that lacks `p5` and one that has it share a header: keep a metric's parts together.
    order = {key.partition(".")[0]: place for place, key in reversed(list(enumerate(heads)))}
    heads.sort(key=lambda key: order[key.partition(".")[0]])
    target = io.StringIO()
    writer = csv.DictWriter(target, heads, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _unformulated(value) for key, value in row.items()} for row in rows)
    return target.getvalue()


def _unformulated(value: Any) -> Any:
    """Return a cell that no spreadsheet reads as a formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


class TerminalTable:
    """The table for a terminal: cost, fidelity and quality, each cut where the width ends.

    The record's warnings are left out.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield parts that fit, then the footnotes."""
        from rich.text import Text

        for group in ("cost", "fidelity", "quality"):
            for places in self._cut(group, options.max_width):
                yield self._part(group, places)
        notes = [note for note in self._table.notes if not note.startswith(WARNING)]
        yield Text("\n".join(notes), style="dim")

    def _cut(self, group: str, width: int) -> list[list[int]]:
        """Return the columns of a group in runs that fit the width."""
        rows = self._table.rows
        name = min(max((len(row.label) for row in rows), default=0), _MOST_NAME) + 4
        runs: list[list[int]] = []
        room = 0
        for place, column in enumerate(self._table.columns):
            if column.group != group:
                continue
            texts = [*_head(column).split("\n"), *(row.cells[place].text + " " for row in rows)]
            needed = max(map(len, texts)) + 2
            if not runs or needed > room:
                runs.append([])
                room = width - name
            runs[-1].append(place)
            room -= needed
        return runs

    def _part(self, group: str, places: Sequence[int]) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        part = RichTable(title=group, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        part.add_column("config", overflow="fold", max_width=_MOST_NAME)
        for place in places:
            part.add_column(Text(_head(self._table.columns[place])), justify="right", no_wrap=True)
        for row in self._table.rows:
            line = [Text(row.label)]
            for cell in (row.cells[place] for place in places):
                text = cell.text + (DAGGER if cell.dagger else "")
                line.append(Text(text, style="bold" if cell.bold else ""))
            part.add_row(*line, style="dim" if row.kind == "fewer steps" else None)
        return part


def terminal_table(record: record_files.Record, only: Sequence[str] | None = None) -> TerminalTable:
    """Return the table of a checked record for `rich` to print; `only` as in `table_of`."""
    return TerminalTable(table_of(record, only))


def _head(column: record_files.Column) -> str:
    """Return a heading on two lines: the name, and the part in brackets."""
    return f"{column.name}\n{column.spread}".strip()

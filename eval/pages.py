"""Pages that are generated: write them, or check that they are up to date."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffcache.command import FAILED, fail, script
from diffcache.files import write_file

BAR, PLAIN_BAR = r"(?<!\\)\|", r"\\|"
LINK = r"\[([^\]]*)\]\([^)]*\)"
LONGEST, SHORT = 80, 40  # characters of a cell, and of one that needs no line of its own


def keep_pages(made: Callable[[str], str], *pages: Path) -> Callable[..., int]:
    """Return the `main` of a module that makes pages.

    `made` returns the text of a page, given the text that is there, empty without a page.
    """

    def keep(
        files: Annotated[list[Path], typer.Argument(metavar="PAGE...")] = list(pages),  # noqa: B006
        check: Annotated[bool, typer.Option("--check", help="Exit with 1 if out of date.")] = False,
        write: Annotated[bool, typer.Option("--write", help="Write what is out of date.")] = False,
    ) -> None:
        """Write generated pages, or check that they are up to date."""
        if check == write:
            raise ValueError("give --write or --check")
        for file in files:
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            after = made(before)
            if before != after and check:
                fail(f"{file}: out of date; run with --write", FAILED, "")
            if before != after:
                write_file(file, after)

    return script(keep)


def escape_markdown(text: str) -> str:
    """Return text that Markdown prints as it is, on one line."""
    plain = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{sign}" if sign in "\\`*_|~#" else sign for sign in plain)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> list[str]:
    """Return the lines of a Markdown table, with signs | in its cells escaped.

    Cells of more than `LONGEST` characters are cut, and written in full in a list below the table. With `numbers` all
    columns but the first are aligned to the right.
    """
    notes: list[str] = []
    head, *lines = (
        f"| {' | '.join(re.sub(BAR, PLAIN_BAR, _cut(cell, notes)) for cell in row)} |" for row in (titles, *rows)
    )
    others = ("---:|" if numbers else "---|") * (len(titles) - 1)
    below = [f"- ({number}) {note}" for number, note in enumerate(notes, 1)]
    return [head.replace("|  |", "| |"), f"|---|{others}", *lines, *([""] if notes else []), *below]


class _EmptyError(Exception):
    """A value of a cell is None, which leaves it empty."""


class _Cell(string.Formatter):
    """Formats the values of a row; one with its interval or quartiles in brackets."""

    def format_field(self, value: Any, spec: str) -> Any:
        if value is None:
            raise _EmptyError
        if not isinstance(value, Mapping):
            return super().format_field(value, spec)
        names = ("median", "q1", "q3") if "median" in value else ("value", "low", "high")
        middle, low, high = (format(value[name], spec) for name in names)
        return f"{middle} ({low} to {high})"

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if key not in kwargs:  # a column that no row has is a mistake, and no empty cell
            raise ValueError(f"a row has no {key!r}; it has {', '.join(kwargs)}")
        return kwargs[str(key)]


def rendered(name: str, **values: Any) -> str:
    """Return the text that a template of this folder makes of values."""
    text: str = environment().get_template(name).render(**values)
    return text


def columns(rows: Iterable[Mapping[str, Any]], cells: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of rows of a record.

    Args:
        rows: Rows.
        cells: Title of each column, and its cell as `str.format` takes it, such as
            `{ratio:.2f}`. A value with an interval or quartiles has these in brackets; a cell of
            which a value is None is empty.
    """
    titles, forms = zip(*cells, strict=True)
    return "\n".join(table(titles, ([cell(form, row) for form in forms] for row in rows)))


def cell(form: str, row: Mapping[str, Any]) -> str:
    """Return one cell of `columns`."""
    try:
        return _Cell().vformat(form, (), row)
    except _EmptyError:
        return ""


def _cut(cell: str, notes: list[str]) -> str:
    """Return a cell of readable length; a longer one is added to the notes in full."""
    text = re.sub(LINK, r"\1", cell)
    if len(text) <= LONGEST:
        return cell
    if cell not in notes:
        notes.append(cell)
    text = text[: LONGEST - 10].rstrip("\\ ")
    text += "`" * (len(re.findall(r"(?<!\\)`", text)) % 2)
    return f"{text}... ({notes.index(cell) + 1})"


def entries(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows with long texts as the lines of a Markdown list.

    The first cell begins an entry, and short columns follow it with their titles. If one column is long it comes next
    (the last column where none is); several long ones form a list of their own. Each cell is on one line; empty ones
    are left out.
    """
    every = [list(row) for row in rows]
    wide = [at for at in range(1, len(titles)) if any(len(row[at]) > SHORT for row in every)]
    wide = wide or [len(titles) - 1]
    lines = []
    for row in every:
        near = [at for at in range(1, len(titles)) if row[at] and at not in wide]
        told = ", ".join(f"{titles[at]} {row[at]}" for at in near)
        line = f"- {row[0]} ({told})" if near else f"- {row[0]}"
        if len(wide) == 1:
            lines.append(f"{line}: {row[wide[0]]}" if row[wide[0]] else line)
        else:
            lines += [line, *(f"  - {titles[at]}: {row[at]}" for at in wide if row[at])]
    return lines


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with a text between two of its lines.

    Raises ValueError if the page does not have the two lines in order.
    """
    before, found, rest = page.partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also:
        raise ValueError(f"the page needs the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


@functools.cache
def environment() -> Any:
    """Return jinja2's environment for the templates of this folder, by their paths in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=lambda name: str(name).endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters["md"] = escape_markdown
    found.globals.update(cell=cell, columns=columns)
    return found

"""Tables in documents, filled from records, so that no number in them is typed.

A document marks a place with `<!-- diffcache.eval: NAME -->` and `<!-- /diffcache.eval -->`, each
on a line of its own. `NAME` is that of the record's file, or of its folder where the file is called
`record.json`. `<!-- diffcache.eval: NAME columns=evaluations,psnr_db -->` takes some columns only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffcache.eval.pages import escape_markdown
from diffcache.eval.report.records import FILE, Record, load
from diffcache.eval.report.table import markdown, table_of
from diffcache.eval.report.words import conditions
from diffcache.files import write_file

_OPEN = re.compile(r"^<!-- diffcache\.eval: (?P<name>\S+)(?: columns=(?P<columns>\S+))? -->$")
_CLOSE = "<!-- /diffcache.eval -->"
_LOOKS_OPEN = "<!-- diffcache.eval"


def update(path: Path, records: Sequence[Path], check: bool = False) -> bool:
    """Fill the marked places of a document with the tables of records.

    Args:
        path: A Markdown file.
        records: Records, or folders of runs; each must have a place and each place a record.
        check: Write nothing, only compare.

    Returns:
        Whether the document differed from its records.

    Raises:
        FileNotFoundError: If the document or a record is not there.
        ValueError: If a place has no record, a record no place, or a mark no end.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such document")
    named: dict[str, Record] = {}
    for file in records:
        name = name_of(file)
        if name in named:
            raise ValueError(f"{file}: another record is called {name!r} too; rename one file")
        named[name] = load(file)
    before = path.read_text(encoding="utf-8")
    after = filled(before, named, str(path))
    if before != after and not check:
        write_file(path, after)
    return before != after


def name_of(file: Path) -> str:
    """Return what a document calls a record: its file's name, or its folder's."""
    file = file.absolute()
    if file.is_dir():
        return file.name
    return file.parent.name if file.name == FILE else file.stem


def filled(text: str, records: Mapping[str, Record], name: str = "document") -> str:
    """Return a document with its marked places filled.

    Args:
        text: Text of the document.
        records: Records by their names in the document.
        name: Name of the document, in errors.

    Raises:
        ValueError: If a place is wrong, as in `update`.
    """
    kept: list[str] = []
    used = set()
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        opened = _OPEN.match(line.strip())
        if opened is None and line.strip().startswith(_LOOKS_OPEN):
            raise ValueError(f"{where}: {line.strip()!r}: must be <!-- diffcache.eval: NAME -->")
        if opened is not None:
            if inside:
                raise ValueError(f"{where}: the place before it has no {_CLOSE}")
            inside = True
            kept += [line, *_block(opened, records, where)]
            used.add(opened["name"])
        elif line.strip() == _CLOSE:
            if not inside:
                raise ValueError(f"{where}: {_CLOSE} without a beginning")
            inside = False
            kept.append(line)
        elif not inside:
            kept.append(line)
    if inside:
        raise ValueError(f"{name}: the last place has no {_CLOSE}")
    unused = sorted(set(records) - used)
    if unused:
        raise ValueError(
            f"{name}: no place for {', '.join(unused)}; mark one with "
            f"<!-- diffcache.eval: {unused[0]} --> and {_CLOSE}"
        )
    return "\n".join(kept) + ("\n" if text.endswith("\n") else "")


def _block(opened: re.Match[str], records: Mapping[str, Record], where: str) -> list[str]:
    record = records.get(opened["name"])
    if record is None:
        given = ", ".join(records) or "none"
        raise ValueError(f"{where}: no record is called {opened['name']!r}; given: {given}")
    only = opened["columns"].split(",") if opened["columns"] else None
    try:
        table = table_of(record, only)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    source = escape_markdown(conditions(record))
    return ["", *markdown(table).rstrip().splitlines(), "", source, ""]

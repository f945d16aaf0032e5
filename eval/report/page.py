"""A report as one page, from the templates beside this file.

The HTML file needs nothing else: no script to read it, no network.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from diffcache.eval.pages import environment
from diffcache.eval.report import words
from diffcache.eval.report.section import Picture, Section
from diffcache.eval.report.table import DAGGER, WARNING, markdown

_PNG_WIDTH = slice(16, 20)  # where a PNG says it
_SCALE = 0.8  # of plots on the page: they are of different widths, and their letters of one size


def render(
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

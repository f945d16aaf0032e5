"""Tables of `diffcache kv` as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diffcache.run_report import human

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def spread(found: Mapping[str, float], sign: str = "", places: int = 3) -> str:
    """Return a number with its interval, where it has one."""
    form = f"{sign}.{places}f"
    if "low" not in found:
        return f"{found['value']:{form}}"
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def broken(name: str, width: int = 38) -> str:
    """Return a long name on several lines, broken behind commas and the signs |."""
    lines = [""]
    for part in re.findall(r"[^,|]+[,|]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def recall_tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Return titles and rows of what is printed of recall: what is known, and what it takes."""
    known: list[tuple[str, ...]] = []
    takes: list[tuple[str, ...]] = []
    for row in rows:
        seconds, name = row["seconds"], broken(str(row["name"]))
        known.append((
            name, spread(row["whole"]), f"{row['lookup']['value']:.3f}",
            f"{row['copy']['value']:.3f}", f"{row['perplexity']:.2f}", f"{row['share']:.1%}",
        ))  # fmt: skip
        takes.append((
            name, human(row["bytes"], "B"), f"{row['share']:.1%}", f"{row['slots']:.0f}",
            f"{row['read']:.0%}", f"{seconds['prefill'] + seconds['compress']:.3f}",
            f"{1e3 * seconds['token']:.1f}",
        ))  # fmt: skip
    return (
        (("", "whole", "look-up", "copy", "perplexity", "share"), known),
        (("", "bytes", "share", "slots", "read", "s/context", "ms/token"), takes),
    )


def text_tables(rows: Mapping[str, dict[str, Any]]) -> tuple[Table, Table]:
    """Return titles and rows of what is printed of texts: what is known, and what it takes.

    Args:
        rows: Rows of a record by the word of their recipe.
    """
    known: list[tuple[str, ...]] = []
    takes: list[tuple[str, ...]] = []
    for word, row in rows.items():
        name, needle = broken(word), row["needle"]
        known.append((
            name, spread(row["perplexity"], places=2), spread(row["ratio"]),
            "" if needle is None else spread(needle, places=2), spread(row["copy"], places=2),
        ))  # fmt: skip
        milliseconds = 1e3 * row["token_seconds"]["median"]
        ratio = "{median:.2f} ({q1:.2f} to {q3:.2f})".format(**row["token_ratio"])
        takes.append(
            (name, human(row["bytes"], "B"), f"{row['share']:.1%}", f"{milliseconds:.1f}", ratio)
        )
    return (
        (("", "perplexity", "x none", "needle", "copy"), known),
        (("", "bytes", "share", "ms/token", "x DynamicCache"), takes),
    )

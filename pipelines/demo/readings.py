"""The read-outs of films as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diffcache.pipelines.demo.stream import Chunk
from diffcache.run_report import human

_BYTES = {
    "bytes": "held in all",
    "sinks_bytes": "first frames (sinks)",
    "history_bytes": "later frames",
    "working_bytes": "rotated copies and room",
    "decoder_bytes": "autoencoder",
}
_Row = Callable[[Chunk], str]


def table(
    titles: Sequence[str], chunks: Sequence[Chunk], waiting: Sequence[int], first: float
) -> str:
    """Return the read-outs as a Markdown table.

    Args:
        titles: Names of the films.
        chunks: Latest chunk of each.
        waiting: Chunks of each that are made and not shown.
        first: Seconds from the start until all films had their first frames.
    """
    counts = {id(chunk): count for chunk, count in zip(chunks, waiting, strict=True)}
    rows: dict[str, _Row] = {
        "frames made a second": lambda c: f"{len(c.frames) / c.readings['p50']:.1f}",
        "a chunk takes, p50": lambda c: _milliseconds(c.readings["p50"]),
        "a chunk takes, p95": lambda c: _milliseconds(c.readings["p95"]),
        "first frame after": lambda c: _milliseconds(first),
    }
    known = [key for key in _BYTES if all(key in chunk.readings for chunk in chunks)]
    for key in known:
        rows[_BYTES[key]] = lambda c, key=key: human(c.readings[key], "B")  # type: ignore[misc]
    if all("drift" in chunk.readings for chunk in chunks):
        rows["color drift (of 255)"] = lambda c: f"{c.readings['drift']:.1f}"
    rows["chunk"] = lambda c: str(c.number)
    rows["chunks that wait"] = lambda c: str(counts[id(c)])
    lines = [
        " | ".join(["", "", *titles, ""]),
        " | ".join(["", "---", *["---:"] * len(titles), ""]),
    ]
    for name, row in rows.items():
        lines.append(" | ".join(["", name, *map(row, chunks), ""]))
    return "\n".join(line.strip() for line in lines)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"

"""The report as one HTML file that needs nothing else: no script to read it, no network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from diffcache.eval.report import words
from diffcache.eval.report.columns import Column
from diffcache.eval.report.section import Picture, Section
from diffcache.eval.report.table import DAGGER, WARNING, Row, Table

_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
_PNG_WIDTH = slice(16, 20)  # where a PNG says it
_SCALE = 0.8  # of plots on the page
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2028; --soft: #5b636e; --line: #d8dce2;
  --ground: #ffffff; --raised: #f5f7fa; --mark: #2563af;
  --lite: #8a5a00; --lite-ground: #fdf1d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #a2abb7; --line: #343b46;
  --ground: #14171c; --raised: #1d2229; --mark: #7db3ee; --lite: #f3c565;
  --lite-ground: #3a2e12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1.5rem clamp(0.8rem, 3vw, 2rem) 4rem;
  background: var(--ground); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 0.5rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 0 0 0.4rem; }
p, ul { max-width: 75ch; } a { color: var(--mark); }
.summary li { margin: 0.3rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; text-align: right; white-space: nowrap; }
th { background: var(--raised); vertical-align: bottom; font-weight: 600; }
th small { display: block; font-weight: 400; color: var(--soft); }
th[data-sort] { cursor: pointer; }
td { border-top: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--raised); max-width: 22rem; overflow: hidden; text-overflow: ellipsis; }
tr.fewer td { color: var(--soft); } td i { font-style: normal; color: var(--soft); }
td b { font-weight: 700; color: var(--ink); }
.badge { display: inline-block; padding: 0 0.4em; border-radius: 4px; font-size: 0.72rem;
  font-weight: 600; color: var(--lite); background: var(--lite-ground); }
.notes { font-size: 0.84rem; color: var(--soft); padding-left: 1.1rem; }
.warning { border-left: 4px solid var(--lite); background: var(--lite-ground); color: var(--ink);
  padding: 0.4rem 0.8rem; border-radius: 0 6px 6px 0; margin: 0.5rem 0; }
figure { margin: 0 0 1.6rem; }
figcaption { font-size: 0.84rem; color: var(--soft); max-width: 85ch; }
figcaption ul { margin: 0.2rem 0 0; padding-left: 1.1rem; }
figure .scroll { background: #fff; } figure img { display: block; }
.plot img, .sheet img { max-width: 100%; height: auto; }
.plot img { margin: 0 auto; }
.films { display: flex; flex-wrap: wrap; gap: 0.8rem; } .films figure { margin: 0; width: 180px; }
video { width: 180px; border-radius: 6px; background: #000; image-rendering: pixelated; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0.25rem 1rem;
  font-size: 0.88rem; } dt { color: var(--soft); } dd { margin: 0; }
dd { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.92em; }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.5rem; }
  .plot .scroll img { width: 640px; max-width: none; } .sheet .scroll img { max-width: none; }
  th:first-child, td:first-child { max-width: 9rem; } }
@media print { .scroll { overflow: visible; } }
"""
_SCRIPT = """
document.querySelectorAll("th[data-sort]").forEach(function (head) {
  head.addEventListener("click", function () {
    var table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
    var up = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("th").forEach(function (one) { one.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    var key = function (row) { var v = row.cells[at].dataset.value; return v === "" ? null : +v; };
    Array.from(body.rows).sort(function (a, b) {
      var x = key(a), y = key(b);
      if (x === null || y === null) { return (x === null) - (y === null); }
      return up ? x - y : y - x;
    }).forEach(function (row) { body.appendChild(row); });
  });
});
"""


def render(
    title: str, sections: Sequence[Section], joint: Sequence[Picture], notes: Sequence[str]
) -> str:
    """Return a page.

    Args:
        title: Of the page.
        sections: One for each record.
        joint: Plots of all records together.
        notes: Sentences at the top.
    """
    several = len(sections) > 1
    parts = [f"<p>{escape(note)}</p>" for note in notes]
    parts += [_plots("All runs together", joint)] if joint else []
    for section in sections:
        parts += [f"<section>{f'<h1>{escape(section.title)}</h1>' if several else ''}"]
        parts += [*_body(section), "</section>"]
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        f"<script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _body(section: Section) -> list[str]:
    record, table = section.record, section.table
    lines = ['<ul class="summary">', *_items(words.summary(record)), "</ul>"]
    lines += [f'<p class="warning">{escape(text)}</p>' for text in _warnings(record)]
    notes = [note for note in table.notes if not note.startswith(WARNING)]
    lines += ["<h2>Table</h2>", _table(table), '<ul class="notes">', *_items(notes), "</ul>"]
    if any(column.lite for column in table.columns):
        lines.append(f'<p><span class="badge">lite</span> {escape(words.LITE)}</p>')
    lines += [_plots("Plots", section.plots), _plots("Samples", section.sheets, "sheet")]
    lines += _films(section)
    if section.left_out:
        lines += ["<h2>Left out</h2><ul>", *_items(section.left_out), "</ul>"]
    lines += ["<h2>How it was measured</h2>", _pairs(words.facts(record))]
    lines += ["<h2>Settings of the rows</h2>", _pairs(words.methods(record))]
    return lines


def _warnings(record: dict[str, Any]) -> list[str]:
    unfinished = [] if record.get("finished", True) else ["The run is not finished."]
    return unfinished + [str(text) for text in record.get("warnings") or []]


def _items(texts: Iterable[str]) -> list[str]:
    return [f"<li>{escape(text)}</li>" for text in texts]


def _table(table: Table) -> str:
    heads = "".join(map(_head, table.columns))
    rows = "\n".join(map(_row, table.rows))
    return (
        '<div class="scroll" tabindex="0"><table><thead><tr><th>Config</th>'
        f"{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _head(column: Column) -> str:
    badge = f' <span class="badge" title="{escape(words.LITE)}">lite</span>' if column.lite else ""
    name = escape(column.name)
    return f'<th data-sort="1">{name}{badge}<small>{escape(column.spread)}</small></th>'


def _row(row: Row) -> str:
    cells = []
    for cell in row.cells:
        number, _, spread = cell.text.partition(" [" if " [" in cell.text else " (")
        sign = "[" if " [" in cell.text else "("
        text = escape(number) + (f"<sup>{DAGGER}</sup>" if cell.dagger else "")
        text = f"<b>{text}</b>" if cell.bold else text
        text += f" <i>{escape(sign + spread)}</i>" if spread else ""
        value = "" if cell.number is None else repr(cell.number)
        cells.append(f'<td data-value="{value}">{text}</td>')
    kind = ' class="fewer"' if row.kind == "fewer steps" else ""
    name = escape(row.label)
    return f'<tr{kind}><td title="{name}">{name}</td>{"".join(cells)}</tr>'


def _plots(title: str, pictures: Sequence[Picture], kind: str = "plot") -> str:
    if not pictures:
        return ""
    found = [f"<h2>{escape(title)}</h2>"]
    for picture in pictures:
        more = f"<ul>{''.join(_items(picture.lines))}</ul>" if picture.lines else ""
        # Plots are of different widths; one scale for all gives their letters one size.
        pixels = int.from_bytes(picture.png[_PNG_WIDTH], "big")
        width = f' width="{round(_SCALE * pixels)}"' if kind == "plot" else ""
        found.append(
            f'<figure class="{kind}"><h3>{escape(picture.title)}</h3><div class="scroll">'
            f'<img alt="{escape(picture.caption)}"{width} src="{_data(picture.png, "image/png")}">'
            f"</div><figcaption>{escape(picture.caption)}{more}</figcaption></figure>"
        )
    return "\n".join(found)


def _films(section: Section) -> list[str]:
    if not section.films:
        return []
    found = ['<h2>Films</h2><div class="films">']
    for caption, data in section.films:
        source = _data(data, "video/mp4")
        found.append(
            f'<figure><video controls loop muted playsinline src="{source}"></video>'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    return [*found, "</div>"]


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in pairs)}</dl>"


def _data(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

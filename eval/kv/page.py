"""`docs/kv.md`: every recipe, from its docstring, its parts and its figures."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcache.eval.kv.introduction import INTRODUCTION
from diffcache.eval.kv.parts import composition, example
from diffcache.eval.kv.versus import figures_of, joint_figures, peer_lines, timing_lines
from diffcache.eval.pages import keep_page
from diffcache.eval.record import ROOT
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.catalog import recipe_function, reference
from diffcache.names import RECIPES

PAGE = Path("docs/kv.md")
RECORD, TIMES = "kv-recall.json", "kv.json"
# Module of recipes -> its title; another module gets its own name.
TITLES: Mapping[str, str] = {
    "streaming": "First and latest tokens",
    "eviction": "Eviction by a score",
    "eviction_more": "Eviction by statistics, windows, blends and probes",
    "eviction_offline": "Eviction by tables found beforehand",
    "merging": "Merging and diversity",
    "quantised": "Quantization and sparsity",
    "low_rank": "Low rank and layers in terms of one another",
    "retrieval": "Retrieval: nothing is dropped",
}
METHODS_HEAD = """\
## Methods

`budget` is what a row holds on average, or for retrieval what a query reads. Parts with their
defaults are written by name; settings are those of the recipe's defaults where they differ from the
part's own. Figures: the share of answers that are right after a context was compressed before
anybody asked (95 % bootstrap interval), on recall-llama, at the share of an exact cache's bytes
that is really held (or, for retrieval, of the slots that a query reads).
"""


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: Of the project, for its records.
    """
    record, times = (_read(directory / "assets" / "bench" / name) for name in (RECORD, TIMES))
    parts = [INTRODUCTION, METHODS_HEAD]
    for module, names in RECIPES.items():
        rows = [_row(recipe_function(name), name, record) for name in names]
        title = TITLES.get(module, module.replace("_", " ").capitalize())
        parts.append(f"### {title}\n\n`diffcache.kv.recipes.{module}`\n\n" + _table(rows) + "\n")
    parts += [text for text in (_results(record), _times(times)) if text]
    return "\n".join(parts).rstrip() + "\n"


def _row(function: Callable[..., Recipe], name: str, record: Mapping[str, Any] | None) -> list[str]:
    said = story(function)
    cells = [f"`{name}`", said["what"], composition(example(function)), said["source"],
             said["departures"]]  # fmt: skip
    return [*cells, "<br>".join(figures_of(record, name)) if record else ""]


def _table(rows: list[list[str]]) -> str:
    titles = ["recipe", "what it does", "parts", "source", "departures", "figures"]
    if not any(row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *lines])


def story(function: Callable[..., Recipe]) -> dict[str, str]:
    """Return what a docstring says: `what` it does, `source` and `departures`.

    Raises:
        ValueError: If it names no reference.
    """
    doc = inspect.cleandoc(function.__doc__ or "")
    what = " ".join(re.split(r"\n\n", doc)[0].split()).rstrip(".")
    text = reference(function)
    source, _, rest = re.split(r"\s*(Departures?:)\s*", text, maxsplit=1) if (
        re.search("Departures?:", text)
    ) else (text, "", "")  # fmt: skip
    return {"what": what, "source": source.rstrip("."), "departures": rest.rstrip(".")}


def cell(text: str) -> str:
    """Return text that may stand in a table."""
    return text.replace("|", "\\|")


def _results(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    shapes = record["shapes"]
    about = (
        f"recall-llama, contexts of {shapes['context']} tokens with {shapes['facts']} facts, "
        f"{shapes['samples']} contexts, {shapes['queries']} questions each, {shapes['dtype']}; "
        f"transformers {record['versions']['transformers']}. All figures: "
        f"`assets/bench/{RECORD}`; to measure them again: `{record['command']}`."
    )
    parts = ["## Together and beside kvpress\n", about, "", *joint_figures(record)]
    parts += peer_lines(record)
    return "\n".join(parts) + "\n"


def _times(record: Mapping[str, Any] | None) -> str:
    return "" if record is None else "\n".join(["## Host time and bytes\n", *timing_lines(record)])


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check that it is up to date; return an exit code."""
    return keep_page("diffcache.eval.kv.page", PAGE, page, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

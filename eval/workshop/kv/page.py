"""`docs/kv.md` behind its introduction: every recipe with its docstring, parts and figures."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from diffcache.eval.kv.peer import PREFIX
from diffcache.eval.kv.recall_cost import hits_of
from diffcache.eval.kv.recipe_parts import composition, example
from diffcache.eval.kv.reuse import SPARE
from diffcache.eval.kv.text_task import held_share
from diffcache.eval.metrics.intervals import share_change
from diffcache.eval.pages import entries, environment, keep_pages
from diffcache.eval.record import FOLDER, ROOT
from diffcache.files import read_json
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.by_name import reference
from diffcache.registry import rows_of
from diffcache.run_report import human

Row = Mapping[str, Any]
PAGE = Path("docs/kv.md")
DERIVED = "test_official_"  # and the name of a recipe
RECORD, TIMES, FLAT = "kv-recall.json", "kv.json", "capacity.json"
TOKENS = tuple(f"decode{name}.json" for name in ("", "-4096", "-smollm2", "-smollm2-4096"))
TEXTS, REUSED = "kv-smollm2.json", "kv-reuse.json"
METHODS = "## Methods\n"  # what stands before is written by hand, but for what stands between:
HALF, USE = "## Half the memory\n", "## Use\n"
ABOUT_HALF = 0.55  # half of the slots, and the positions and statistics beside them
# Caches of the table of tokens -> what takes their time where they miss their aim.
SLOW: Mapping[str, str] = {
    "snapkv 25 %": "projections and host time: attention is a fifth of a token here",
    "streaming_llm 25 %": "the first keys are turned anew in every layer",
    "h2o 25 %": "the attention to every slot is taken a second time, to be added up",
    "tova 25 %": "the attention to every slot is taken a second time, to be ranked",
    "quest 256": "the first fifth of the layers reads everything; some fifty small operations "
    "choose and gather in each other",
    "tidal_decode 256": "the two layers that choose and the two before them read everything",
    "kivi 2": "codes are spread, made floats, scaled and moved: four passes over keys and values",
    "kivi 4": "codes are spread, made floats, scaled and moved: four passes over keys and values",
    "kivi 4 + quest 256": "the first fifth of the layers decodes everything; chosen slots are "
    "decoded and gathered by many small operations; values are coded one by one",
    "xkv": "keys: half the time their product with the basis, half rotating them; values: little",
    "shadowkv 512": "some 240 small operations a layer, of landmarks, chosen keys, outliers",
    "gear 2": "codes are spread and scaled (two thirds), outliers put in; the low rank is apart",
    "mustafar": "two look-ups a byte of the bitmap, an addition and a look-up a channel",
    "rotatekv 4": "keys: restored, multiplied back by the rotation, rotated by position; values: restored",
}
# Presses that are called otherwise here, and what else our word says.
OURS: Mapping[str, tuple[str, str]] = {
    "observed_attention": ("h2o", ""),
    "cur": ("curdkv", ""),
    "critical_adakv": ("criticalkv", "base='adakv"),
}


@cache
def words() -> Any:
    """Return the sections that are made of records, macros of a template."""
    return environment().get_template("workshop/kv/page.md.jinja").module


def page() -> str:
    """Return the whole page."""
    record, times, flat, texts, again = (read_json(FOLDER / name) for name in (RECORD, TIMES, FLAT, TEXTS, REUSED))
    introduction = (ROOT / PAGE).read_text(encoding="utf-8").partition(METHODS)[0]
    first, _, use = introduction.partition(USE)
    picture = f"![answers against bytes and seconds](../assets/bench/{Path(TEXTS).stem}.png)"
    answered = f"{HALF}\n{half(texts)}\n{picture}\n"
    parts = [f"{first.partition(HALF)[0]}{answered}\n{USE}{use}{METHODS}\n{words().methods()}"]
    equal = compared()
    titles = ["recipe", "what it does", "parts", "source", "mode", "departures", "equal to official code"]
    listed = rows_of("recipe").values()
    for title in dict.fromkeys(row.family for row in listed):
        family = [row for row in listed if row.family == title]
        measured = [each for row in family for each in figures_of(record, row.name)]
        lines = entries(titles, [_recipe(row.load(), row.name, equal) for row in family])
        place = family[0].place.partition(":")[0]
        parts.append("\n".join([f"### {title}\n\n`{place}`\n", *lines, "", words().figures("recipe", measured)]))
    tokens = [read_json(FOLDER / name) for name in TOKENS]
    spread = [{**row, "held": human(row["bytes"], "B")} for row in again["rows"]]
    parts += [results(record), words().reused(again, spread, SPARE), seconds(tokens)]
    parts += [words().capacity(flat), words().timing(times)]
    return "\n".join(parts).rstrip() + "\n"


def half(record: Mapping[str, Any]) -> str:
    """Return what a real model keeps of texts under each recipe, that of half the memory first."""
    exact, *others = ({**row, "held": held_share(row)} for row in record["rows"])
    others.sort(key=lambda row: (row["held"] > ABOUT_HALF, -row["whole"]["value"], row["ratio"]["value"]))
    able = [kind for kind in exact["kinds"] if kind in exact["able"]]
    told: str = words().half(
        record,
        others[0],
        [{**exact, "change": None}, *others],
        sum(len(exact["hits"][kind][0]) for kind in able),
        [f"{kind} {found['value']:.2f}" for kind, found in exact["kinds"].items()],
        [kind for kind in exact["kinds"] if kind not in able],
    )
    return told


def _recipe(function: Callable[..., Recipe], name: str, equal: Mapping[str, str]) -> list[str]:
    said = story(function)
    parts, departures = composition(example(function)), said["departures"]
    cells = [said["what"], parts, said["source"], modes(function), departures]
    return [f"`{name}`", *cells, equal.get(name, "")]


def story(function: Callable[..., Recipe]) -> dict[str, str]:
    """Return what a docstring says: `what` it does, `source` and `departures`; ValueError without a reference."""
    what = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
    source, *rest = re.split(r"\s*Departures?:\s*", reference(function), maxsplit=1)
    return dict(
        what=" ".join(what.split()).rstrip("."), source=source.rstrip("."), departures="".join(rest).rstrip(".")
    )


def compared() -> dict[str, str]:
    """Return what of each recipe a test compares with official code, from its docstring."""
    found = {}
    for file in sorted((ROOT / "tests" / "kv" / "official").glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith(DERIVED):
                said = (ast.get_docstring(node) or "").partition("\n\n")[0]
                found[node.name.removeprefix(DERIVED)] = " ".join(said.split()).rstrip(".")
    return found


def modes(function: Callable[..., Recipe]) -> str:
    """Return the modes of a recipe, the default first; nothing if it has none."""
    default = inspect.signature(function).parameters.get("mode")
    if default is None:
        return ""
    others = [mode for mode in get_args(get_type_hints(function)["mode"]) if mode != default.default]
    return ", ".join(f"`{mode}`" for mode in (default.default, *others))


def figures_of(record: Mapping[str, Any], name: str) -> list[Row]:
    """Return every row of one recipe alone."""
    return [row for row in record["rows"] if _first(row) == name and "|" not in row["name"]]


def results(record: Mapping[str, Any]) -> str:
    """Return the tables of recipes that are joined, and of recipes beside kvpress."""
    beside = [
        {**ours, "peer": peer, "theirs": peer["whole"], "more": share_change(_whole(peer), _whole(ours)).to_dict()}
        for ours, peer in pairs(record)
    ]
    told: str = words().results(record, [row for row in record["rows"] if "|" in row["name"]], beside)
    return told


def pairs(record: Mapping[str, Any]) -> list[tuple[Row, Row]]:
    """Return each row of kvpress behind ours of the same method and budget, the first there is."""
    found = []
    for peer in record["rows"]:
        if not peer["name"].startswith(PREFIX):
            continue
        press = _first(peer).removeprefix(PREFIX)
        name, inside = OURS.get(press, (press, ""))
        ours = [
            row
            for row in record["rows"]
            if _first(row) == name
            and _budget(row) == _budget(peer)
            and "|" not in row["name"]
            and inside in row["name"]
        ]
        found += [(row, peer) for row in ours[:1]]
    return found


def seconds(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a generated token beside `DynamicCache`, with what takes the time.

    Of the records of `bench decode` that of all caches comes first. A cache that misses its aim without a
    reason in `SLOW` raises KeyError.
    """
    by = [{row["name"]: row for row in each["rows"]} for each in records]
    rows = []
    for name, row in by[0].items():
        found = [each.get(name) for each in by]
        missed = sum(one is not None and bool(one["missed"]) for one in found)
        ratios = {f"ratio_{n}": one and one["ratio"]["median"] for n, one in enumerate(found)}
        rows.append({**row, **ratios, "missed": missed or None, "why": SLOW[name] if missed else None})
    told: str = words().seconds(records, rows)
    return told


def _whole(row: Row) -> Any:
    return hits_of(row).all(-1)


def _first(row: Row) -> str:
    return str(row["name"]).partition(":")[0].replace("-", "_")


def _budget(row: Row) -> str:
    return next(iter(re.findall(r"[:,]budget=([^,]*)", row["name"])), "")


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())

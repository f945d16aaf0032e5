"""`docs/kv.md` behind its introduction: every recipe with its docstring, parts and figures."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from diffcache.eval.cost.interleave import quartiles
from diffcache.eval.kv.parts import composition, example
from diffcache.eval.kv.peer import PREFIX
from diffcache.eval.kv.recall import hits_of
from diffcache.eval.kv.reuse import SPARE
from diffcache.eval.kv.text_plot import held_share
from diffcache.eval.metrics.intervals import share_change
from diffcache.eval.pages import entries, keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.files import read_json
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.catalog import reference
from diffcache.registry import rows_of
from diffcache.run_report import human

Row = Mapping[str, Any]
PAGE = Path("docs/kv.md")
FIGURES = ("whole answers", "look-up", "copy", "bytes held", "slots read")
DERIVED = "test_official_"  # and the name of a recipe
RECORD, TIMES, FLAT = "kv-recall.json", "kv.json", "capacity.json"
TOKENS = tuple(f"decode{name}.json" for name in ("", "-4096", "-smollm2", "-smollm2-4096"))
TEXTS, REUSED = "kv-smollm2.json", "kv-reuse.json"
METHODS = "## Methods\n"  # what stands before is written by hand, but for what stands between:
HALF, USE = "## Half the memory\n", "## Use\n"
ABOUT_HALF = 0.55  # half of the slots, and the positions and statistics beside them
METHODS_HEAD = f"""\
{METHODS}
`budget` is what a row holds on average, or for retrieval what a query reads. Parts with their
defaults are written by name; settings are those of the recipe's defaults where they differ from the
part's own. The tables have the share of whole answers, both tokens right, after a context was
compressed before anybody asked (95 % Wilson interval, which counts the questions of a context as a
cluster); then the look-up, the share of right first tokens, which must be found in the context, and
the copy, that of second tokens right after the right first one; the share of an exact cache's bytes
that is really held, and of the slots that a query reads. Greedy generation gives the same whole
answers. All on recall-llama. Where a recipe has modes, the first is the
default. "Equal to official code" says what a test in `tests/kv/official` compares with the
algorithm of the authors' code, derived anew; where it is missing, none does.
"""
ALIKE = (
    "kvpress 0.5.5 says which slots stay, our store holds exactly those, and both are asked alike. "
    "The first row of ours in the record that has the name and the budget stands beside a press. "
    "Differences of the whole answers are of the same questions, with 95 % intervals for paired "
    "shares (Bonett and Price 2012) over contexts."
)
HELD = (
    "Bytes held for a context, scales, zeros, positions, exact rest and kept queries included, and "
    "the relative error of the attention output for later queries."
)
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


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: The project, for its records and the introduction of the page.
    """
    records = directory / "assets" / "bench"
    record, times, flat = (read_json(records / name) for name in (RECORD, TIMES, FLAT))
    tokens = [found for found in (read_json(records / name) for name in TOKENS) if found]
    introduction, _, _ = (directory / PAGE).read_text(encoding="utf-8").partition(METHODS)
    first, _, use = introduction.partition(USE)
    texts = read_json(records / TEXTS)
    if texts:
        first = f"{first.partition(HALF)[0]}{HALF}\n{half(texts)}\n"
    introduction = f"{first}{USE}{use}"
    parts, equal = [introduction + METHODS_HEAD], compared(directory)
    titles = ["recipe", "what it does", "parts", "source", "mode", "departures"]
    titles += ["equal to official code"]
    listed = rows_of("recipe").values()
    for title in dict.fromkeys(row.family for row in listed):
        family = [row for row in listed if row.family == title]
        lines = [*entries(titles, [_recipe(row.load(), row.name, equal) for row in family]), ""]
        if record:
            measured = [each for row in family for each in figures_of(record, row.name)]
            lines += [*table(["recipe", *FIGURES], measured), ""]
        place = family[0].place.partition(":")[0]
        parts.append("\n".join([f"### {title}\n\n`{place}`\n", *lines]))
    parts += [results(record), ""] if record else []
    again = read_json(records / REUSED)
    parts += [reused(again)] if again else []
    parts += [seconds(tokens)] if tokens else []
    parts += [capacity(flat)] if flat else []
    parts += [timing(times)] if times else []
    return "\n".join(parts).rstrip() + "\n"


def half(record: Mapping[str, Any]) -> str:
    """Return what a real model keeps of texts under each recipe, that of half the memory first."""
    rows, shapes = list(record["rows"]), record["shapes"]
    exact, others = rows[0], rows[1:]
    others.sort(key=lambda row: (held_share(row) > ABOUT_HALF, -_worth(row)[0], -_worth(row)[1]))
    best = others[0]
    able = [kind for kind in exact["kinds"] if kind in exact["able"]]
    beyond = [kind for kind in exact["kinds"] if kind not in exact["able"]]
    questions = sum(len(exact["hits"][kind][0]) for kind in able)
    kinds = ", ".join(f"{kind} {exact['kinds'][kind]['value']:.2f}" for kind in exact["kinds"])
    said = (
        f"Of the recipes that hold about half of an exact cache of 16 bits or less, "
        f"`{best['name']}` kept most: {_share(best['whole'])} of the questions answered whole, "
        f"{_share(best['change'], '+')} beside the exact cache, with {held_share(best):.0%} of its "
        "bytes. On your own model and texts, with contexts held out: `diffcache kv choose --model "
        "DIR --texts FILE --memory 0.5`, or `diffcache.kv.choose(...)`."
    )
    about = (
        f"SmolLM2-135M-Instruct (30 layers, 9 query heads over 3; weights of 4 bits decoded to "
        f"{record['dtype']}), {shapes['samples']} contexts of {shapes['context']} tokens of "
        f"Python's reference and what was hidden between their words, about a quarter more; each "
        f"was read and compressed, and then {questions} questions were asked about it, each of a "
        f"fork. What it answers with nothing dropped: {kinds}. "
        + (f"It cannot answer {' and '.join(beyond)}, which were left out. " if beyond else "")
        + "Intervals of 95 %: Wilson's, with the questions of a context as a cluster, and paired "
        'ones of changes; they are wide where contexts are few. "Asked first": each question '
        "stood before what compresses, for recipes that look at queries. Time is CPU time of a "
        f"token after {shapes['context']} tokens, by that of `DynamicCache` with sdpa, "
        f"in turn, {record['threads']} thread, on {record['device']}, while other work took the "
        f"machine (load average {record['load']:.0f}). Not compared with kvpress. "
        f"Measured at {record['commit']} with `{record['command']}`{record.get('joined', '')}."
    )
    lines = []
    for row in [exact, *others]:
        lines.append(
            [
                f"`{row['name']}`",
                f"{held_share(row):.0%}",
                _share(row["whole"]),
                "" if row is exact else _share(row["change"], "+"),
                "" if row["aware"] is None else _share(row["aware"]),
                _share(row["ratio"]),
                quartiles(row["token_ratio"]),
            ]
        )
    heads = [
        "recipe",
        "held, of 16 bits",
        "answered whole",
        "change",
        "asked first",
        "perplexity x exact",
        "time of a token",
    ]
    picture = f"![answers against bytes and seconds](../assets/bench/{Path(TEXTS).stem}.png)"
    return "\n".join([said, "", *table(heads, lines), "", about, "", picture, ""])


def _worth(row: Row) -> tuple[float, float]:
    return row["whole"]["value"], -row["ratio"]["value"]


def _recipe(function: Callable[..., Recipe], name: str, equal: Mapping[str, str]) -> list[str]:
    said = story(function)
    parts, departures = composition(example(function)), said["departures"]
    cells = [said["what"], parts, said["source"], modes(function), departures]
    return [f"`{name}`", *cells, equal.get(name, "")]


def story(function: Callable[..., Recipe]) -> dict[str, str]:
    """Return what a docstring says: `what` it does, `source` and `departures`.

    Raises:
        ValueError: If it names no reference.
    """
    what = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
    source, *rest = re.split(r"\s*Departures?:\s*", reference(function), maxsplit=1)
    return {
        "what": " ".join(what.split()).rstrip("."),
        "source": source.rstrip("."),
        "departures": "".join(rest).rstrip("."),
    }


def compared(directory: Path = ROOT) -> dict[str, str]:
    """Return what of each recipe a test compares with official code, from its docstring.

    Args:
        directory: Root of the project, for its tests.
    """
    found = {}
    for file in sorted((directory / "tests" / "kv" / "official").glob("test_*.py")):
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


def figures_of(record: Mapping[str, Any], name: str) -> list[list[str]]:
    """Return the cells of every row of one recipe alone."""
    alone = (row for row in record["rows"] if _first(row) == name and "|" not in row["name"])
    return [[f"`{row['name']}`", *_figures(row)] for row in alone]


def _figures(row: Row) -> list[str]:
    """Return the cells of `FIGURES`."""
    answers = [_share(row["whole"]), _value(row, "lookup"), _value(row, "copy")]
    return [*answers, f"{row['share']:.1%}", f"{row['read']:.0%}"]


def results(record: Mapping[str, Any]) -> str:
    """Return the tables of recipes that are joined, and of recipes beside kvpress."""
    shapes, joined = record["shapes"], [row for row in record["rows"] if "|" in row["name"]]
    about = (
        f"recall-llama, contexts of {shapes['context']} tokens with {shapes['facts']} facts, "
        f"{shapes['samples']} contexts, {shapes['queries']} questions each, {shapes['dtype']}; "
        f"transformers {record['versions']['transformers']}. All figures: "
        f"`assets/bench/{RECORD}`; to measure them again: `{record['command']}`."
    )
    lines = ["## Together and beside kvpress\n", about, ""]
    lines += table(["recipes", *FIGURES], ([f"`{row['name']}`", *_figures(row)] for row in joined))
    beside = [
        [
            f"`{ours['name']}`",
            _share(ours["whole"]),
            f"`{peer['name']}`",
            _share(peer["whole"]),
            _share(share_change(_whole(peer), _whole(ours)).to_dict(), "+"),
        ]
        for ours, peer in pairs(record)
    ]
    if beside:
        titles = ["ours", "whole answers", "kvpress", "whole answers", "difference"]
        lines += ["", ALIKE, "", *table(titles, beside)]
    return "\n".join(lines)


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


def timing(record: Mapping[str, Any]) -> str:
    """Return the tables of host time and of bytes."""
    shapes = record["shapes"]
    about = (
        f"Host time of a layer and step, without the arithmetic, at {shapes['slots']:,} slots on "
        f"{record['device']}, {record['threads']} thread, {record['dtype']}; torch "
        f"{record['versions']['torch']}; median and quartiles of {record['rounds']} rounds in turn "
        f"(`{record['command']}`). The arithmetic is a token copied into a buffer and attention; "
        "of coded or ragged rows also reading them into a rectangle. Its median is subtracted."
    )

    def spread(found: Mapping[str, float] | None) -> str:
        quartiles = "{median:.0f} ({q1:.0f} to {q3:.0f})"
        return quartiles.format(**found) if found else ""

    def some(text: str, value: float | None) -> str:
        return "" if value is None else text.format(value)

    steps = [
        [row["name"], spread(row["step_us"]), spread(row["above_floor_us"]), some("at most {:.0f}", row["target_us"])]
        for row in record["rows"]
    ]
    held = [
        [row["name"], f"{row['share']:.4f}", some("at most {}", row["target_share"]), some("{:.4f}", row["error"])]
        for row in record["held"]
    ]
    lines = ["## Host time and bytes\n", about, ""]
    lines += table(["", "µs in all", "µs above the arithmetic", "aim"], steps)
    lines += ["", HELD, "", *table(["", "share of exact bytes", "aim", "error"], held)]
    return "\n".join(lines)


def seconds(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a generated token beside `DynamicCache`, with what takes the time.

    Args:
        records: Records of `bench decode`, the one of all caches first.
    """
    first, bar, *_ = records[0], records[0]["shapes"]
    runs = "; ".join(f"n = {each['rounds']} at {each['commit']} by `{each['command']}`" for each in records)
    about = (
        "CPU seconds of a generated token by those of `DynamicCache` with sdpa, in turn in one "
        f"process: medians, for the first also quartiles. The bar is a Llama of "
        f"{bar['parameters'] / 1e6:.0f} M random weights ({bar['layers']} layers, {bar['heads']} "
        f"query heads over {bar['kv_heads']} of {bar['head_size']}), of fewer layers where the "
        "command says so; SmolLM2 has 135 M (30 layers, "
        f"9 over 3 of 64). {first['dtype']}, {first['threads']} thread, {first['device']}, while "
        f"other work took the machine (load averages {_loads(records)}); {runs}. Modes: where "
        "nothing is dropped or chosen `cache_for` takes stock attention, which needs all of it "
        'decoded; rows that say native were asked for `mode="native"`, which multiplies codes as '
        "they are held. Nothing is a fused kernel, and no decoded block is kept from one token to "
        "the next, so that what is held is what the column says."
    )
    by = [{row["name"]: row for row in each["rows"]} for each in records]
    rows = []
    for name, row in by[0].items():
        found = [each.get(name) for each in by]
        ratios = ["" if one is None else f"{one['ratio']['median']:.2f}" for one in found]
        missed = [one for one in found if one is not None and one["missed"]]
        aim = "" if row["target"] is None else f"{row['target']:.2f}"
        rows.append(
            [
                name,
                row["mode"] or "",
                aim,
                quartiles(row["ratio"]),
                *ratios[1:],
                f"{row['share']:.0%}",
                f"missed {len(missed)}: {SLOW[name]}" if missed else "",
            ]
        )
    heads = [f"{each['shapes']['model']} {each['shapes']['prompt']:,}" for each in records]
    titles = ["cache", "mode", "at most", *heads, "bytes", "where its time goes"]
    return "\n".join(["## A generated token\n", about, "", *table(titles, rows), ""])


def _loads(records: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{each['load']:.0f}" for each in records)


def reused(record: Mapping[str, Any]) -> str:
    """Return the table of answers about documents that were read before."""
    shapes = record["shapes"]
    about = (
        f"`diffcache kv reuse` on SmolLM2-135M-Instruct ({record['dtype']}): {shapes['requests']} "
        f"prompts of {shapes['documents']} documents of {shapes['length']} tokens of Python's "
        f"reference, in an order of their own, out of {shapes['documents'] + SPARE} that were read "
        f"in other prompts, and {shapes['questions']} questions behind each about numbers hidden "
        "in the documents. Times are CPU seconds by those of full recomputation of the same prompt "
        "(`DynamicCache`, sdpa), in turn: median and quartiles. First token: that of the first "
        "question; with `hydragen` all questions are asked at once. All: to the end of the last "
        "answer. Computed: share of the prompt before its question. `prefix` and `hydragen` are "
        "exact; where documents change their order, few prompts begin alike. A question is a "
        "forward of its own behind what was filled in, which recomputation does not need: where "
        "nearly all of a prompt is computed the first token takes longer. Intervals of 95 %, of "
        f"{shapes['requests']} prompts; {record['threads']} thread, {record['device']}, load "
        f"average {record['load']:.0f}; measured at {record['commit']} with "
        f"`{record['command']}`."
    )
    lines = []
    for row in record["rows"]:
        change = "" if row["change"] is None else _share(row["change"], "+")
        lines.append(
            [
                f"`{row['name']}`",
                quartiles(row["first_ratio"]),
                quartiles(row["all_ratio"]),
                _share(row["answers"]),
                change,
                f"{row['computed']:.0%}",
                human(row["bytes"], "B"),
            ]
        )
    heads = ["method", "first token", "all", "answered", "change", "computed", "bytes held"]
    return "\n".join(["## Documents that were read before\n", about, "", *table(heads, lines), ""])


def capacity(record: Mapping[str, Any]) -> str:
    """Return the table of time and bytes over many generated tokens."""
    about = (
        f"{record['rounds']:,} tokens, generated one by one after a prompt of "
        f"{record['shapes']['prompt']}, with every recipe that bounds what it holds at "
        f"{record['shapes']['budget']} slots: the time of a token in each third of them, as a "
        "multiple of the model's time for one token without any cache, bytes after each third, "
        "and the last third by the middle one. The model of the table above, with "
        f"{record['shapes']['layers']} layer; all take turns in one process "
        f"(`{record['command']}`)."
    )
    rows = []
    for row in record["rows"]:
        times, sizes = (
            [f"{value:{form}}" for value in row[key]] for key, form in (("of_alone", ".2f"), ("bytes", ","))
        )
        rows.append([row["name"], *times, f"{row['time_ratio']:.2f}", *sizes, f"{row['bytes_ratio']:.2f}"])
    heads = [
        "cache",
        "first third",
        "middle",
        "last",
        "last by middle",
        "first, bytes",
        "middle",
        "last",
        "last by middle",
    ]
    return "\n".join(["## Ten thousand tokens\n", about, "", *table(heads, rows), ""])


def _share(found: Mapping[str, float], sign: str = "") -> str:
    value, low, high = (f"{found[name]:{sign}.3f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _value(row: Row, name: str) -> str:
    return f"{row[name]['value']:.3f}"


def _whole(row: Row) -> Any:
    return hits_of(row).all(-1)


def _first(row: Row) -> str:
    return str(row["name"]).partition(":")[0].replace("-", "_")


def _budget(row: Row) -> str:
    return next(iter(re.findall(r"[:,]budget=([^,]*)", row["name"])), "")


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())

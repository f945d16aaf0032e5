"""Measure recipes on any causal model, on texts of the user's own: each alone, then seconds a token in turn.

Rows that fail are reported. Times are relative to the same model with a `DynamicCache` and sdpa, in the same process.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from diffcache.eval.cost.interleave import Call, Timings, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.kv.asked import Asked, Spelled, score, spells
from diffcache.eval.kv.recall_cost import exact_bytes, fingerprint, named, rows_before, write_rows
from diffcache.eval.kv.recipe_words import NONE, names_tables, parse_recipe
from diffcache.eval.kv.texts import TextModel, TextWindows, windows
from diffcache.eval.metrics.intervals import Interval, mean_interval, share_change, share_interval
from diffcache.eval.record import Setting
from diffcache.eval.report.palette import DPI, GREY, INK, MARKERS, OKABE_ITO, legend_columns, new_figure, styled
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.questions import compress, feed, read_context
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.most_attention import Asked as Probed
from diffcache.kv.store import KVStore

Progress = Callable[[int, int, str], None]
_DRAWN = 1 << 20  # seeds of spans, apart from that of the windows
SPANS, CUE, SPAN = 2, 8, 8  # repeated spans of a context, tokens that ask and that answer
FOLLOWING = 64  # tokens behind a context that are scored
FLOOR = 0.2  # least share of a kind's answers that the model itself must give


@dataclass(frozen=True)
class TextTask:
    """Texts, and what is asked of them.

    The context is read and compressed, with sentences to ask for between its words; `FOLLOWING`
    tokens of the same text come behind it.
    """

    model: TextModel
    texts: Path | None  # file or folder of texts; None for documentation of Python
    context: int = 512  # tokens of the text in a context
    samples: int = 8  # windows at most
    seed: int = 0  # seed of windows, questions and spans
    aware: bool = False  # whether questions are also asked of a cache that is compressed after each of them

    def __post_init__(self) -> None:
        if self.context < 2 * (CUE + SPAN):
            raise ValueError(f"--context {self.context}: must be at least {2 * (CUE + SPAN)}")
        if self.samples < 2:
            raise ValueError(f"--samples {self.samples}: an interval needs at least 2")

    def windows(self) -> TextWindows:
        """Return the windows; raises ValueError if texts are too short or too few, see `windows`."""
        return windows(self.model, self.texts, self.context + FOLLOWING, self.samples, 2, self.seed)


@dataclass
class _Found:
    """Measurements of the windows so far."""

    nats: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    asked: Spelled | None = None
    hits: list[list[bool]] = field(default_factory=list)
    aware: list[list[bool]] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    in_16_bits: float | None = None
    mode: str = ""


@torch.no_grad()
def measure(
    model: Any,
    recipe: Recipe,
    task: TextTask,
    drawn: TextWindows,
    step: Callable[[int, float], None] | None = None,
    kinds: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the quality of a recipe on texts, and the bytes that it holds.

    `step` is called with the number of windows done and their perplexity. `kinds` are the kinds of questions to ask;
    None for all, and `able` then lists those that the model answers in at least `FLOOR` of the cases.

    Returns:
        With 95 % intervals over windows: `perplexity` of what follows a compressed context; `copy`, the share of right
        tokens where spans of the context are repeated behind it; `whole`, the share of answers given whole to
        questions of the kinds in `able`, `kinds` for each kind, `aware` where each question was known before the
        compression; None where the tokenizer cannot write them or the recipe looks at no queries. `nats` of each
        window, `hits` by kind, `bytes` held for a context, `share` of those of exact keys and values, `share_16` the
        same if these were of 16 bits (None where nothing is coded, or random keys cannot tell), `mode`.

    Raises:
        AttachError: If the recipe cannot serve the model.
    """
    found, tokenizer = _Found(), task.model.tokenizer
    looks = recipe.observes and recipe.trigger is not None and not recipe.trigger.decoding
    try:
        for number, ids in enumerate(drawn.ids):
            asked, context = None, ids[:, : task.context]
            if spells(tokenizer):
                text = tokenizer.decode(context[0], skip_special_tokens=True)
                asked = Spelled.of(tokenizer, Asked.draw(text, task.seed + number), kinds)
                context = asked.ids.to(ids.device)
                tokens, why = context.shape[1] + FOLLOWING, "with what is hidden in and behind it"
                task.model.check_length(tokens, f"--context {task.context}", why)
            cache, read = cache_for(model, recipe), context[:, :-1]
            feed(model, cache, read)
            if asked is not None and task.aware and looks and recipe.score != Probed():
                found.aware.append(asked.aware_hits(model, tokenizer, cache, recipe))
            compress(model, tokenizer, cache, read)
            _weigh(found, cache, recipe, read.shape[1])
            last, later = context[0, -1:].tolist(), ids[0, task.context :].tolist()
            nats, _ = score(model, cache.fork(), last, later, recipe)
            found.nats.append(-nats.double().mean())
            hits = [
                score(model, cache.fork(), last, span, recipe)[1][CUE:] for span in spans(read[0], task.seed + number)
            ]
            found.copies.append(torch.cat(hits))
            if asked is not None:
                found.asked = asked
                found.hits.append(asked.hits(model, cache, recipe))
            if step is not None:
                step(number + 1, float(torch.stack(found.nats).mean().exp()))
    finally:
        detach(model)
    return {"name": recipe.name or "none", **_row(found, kinds)}


def _weigh(found: _Found, cache: KVCache, recipe: Recipe, tokens: int) -> None:
    """Note the bytes of a compressed cache, and once those that it would have in 16 bits."""
    found.bytes.append(float(cache.nbytes))
    found.exact.append(float(exact_bytes(cache, tokens)))
    found.mode = cache.mode
    coded = recipe.codec is not None or bool(recipe.ladder)
    if len(found.bytes) == 1 and coded and not (recipe.rotates or recipe.wants_out):
        found.in_16_bits = _share_of_16_bits(cache, recipe, tokens)


def _share_of_16_bits(cache: KVCache, recipe: Recipe, tokens: int) -> float | None:
    """Return the share of exact bytes that a recipe holds of a number of random tokens in 16 bits."""
    held = [layer.read() for layer in cache.store.layers]
    if cache.store.layers[0].latent:
        return None
    store, drawn = KVStore(len(held), recipe), torch.Generator().manual_seed(0)
    exact = 0
    store.begin(tokens)
    for place, slots in enumerate(held):
        heads = slots.k.shape[1]
        asking = getattr(cache.setup.config, "num_attention_heads", heads)
        sizes = (heads, slots.k.shape[3]), (heads, slots.v.shape[3]), (asking, slots.k.shape[3])
        k, v, q = (torch.randn(1, count, tokens, size, generator=drawn).half() for count, size in sizes)
        exact += 2 * (k.numel() + v.numel())
        store.layers[place].write(k, v)
        store.attend(place, Query(q, 0, k.shape[3] ** -0.5))
    store.settle()
    return store.nbytes / exact


def spans(context: Tensor, seed: int) -> Iterator[list[int]]:
    """Draw spans of a context, int64 [T]: the tokens that ask, then those that answer."""
    generator = torch.Generator().manual_seed(_DRAWN + seed)
    starts = torch.randint(1, len(context) - CUE - SPAN + 1, (SPANS,), generator=generator)
    for start in starts.tolist():
        yield context[start : start + CUE + SPAN].tolist()


def _row(found: _Found, kinds: Sequence[str] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "perplexity": perplexity_of(mean_interval(torch.stack(found.nats))).to_dict(),
        "copy": share_interval(torch.stack(found.copies)).to_dict(),
        "whole": None,
        "kinds": {},
        "needle_by_depth": [],
        "aware": None,
        "able": [],
        "hits": {},
        "bytes": sum(found.bytes) / len(found.bytes),
        "share": sum(found.bytes) / sum(found.exact),
        "share_16": found.in_16_bits,
        "mode": found.mode,
        "nats": torch.stack(found.nats).tolist(),
    }
    if found.asked is None:
        return row
    table, of = torch.tensor(found.hits), found.asked.kinds
    for kind in dict.fromkeys(of):
        some = table[:, [one == kind for one in of]]
        row["kinds"][kind] = share_interval(some).to_dict()
        row["hits"][kind] = ["".join(map(str, one)) for one in some.int().tolist()]
    row["able"] = [kind for kind, share in row["kinds"].items() if share["value"] >= FLOOR]
    row["able"] = row["able"] if kinds is None else list(kinds)
    if "needle" in row["kinds"]:
        places = [number for number, kind in enumerate(of) if kind == "needle"]
        row["needle_by_depth"] = table[:, places].float().mean(0).tolist()
    if row["able"]:
        row["whole"] = share_interval(hits_of(row)).to_dict()
    if found.aware and row["able"]:
        row["aware"] = share_interval(torch.tensor(found.aware)).to_dict()
    return row


def hits_of(row: Mapping[str, Any]) -> Tensor:
    """Return which answers were whole, bool [N, Q]: of each window, questions of `able` kinds."""
    columns = [[[bit == "1" for bit in one] for one in row["hits"][kind]] for kind in row["able"]]
    return torch.cat([torch.tensor(one) for one in columns], 1)


def perplexity_of(nats: Interval) -> Interval:
    """Return the perplexity of a mean of nats a token, with its interval."""
    return Interval(math.exp(nats.value), math.exp(nats.low), math.exp(nats.high), nats.n)


def changes(rows: Mapping[str, dict[str, Any]], first: str) -> None:
    """Compare each row with the first, paired over windows, with intervals.

    `ratio` of perplexities and `change` of whole answers are added to the rows, None where nothing was asked.
    """
    before = torch.tensor(rows[first]["nats"], dtype=torch.float64)
    for row in rows.values():
        change = mean_interval(torch.tensor(row["nats"], dtype=torch.float64) - before)
        row["ratio"] = perplexity_of(change).to_dict()
        row["change"] = None
        if row["whole"] is not None:
            row["change"] = share_change(hits_of(rows[first]), hits_of(row)).to_dict()


BENCHMARK = "kv-text"
STOCK = "DynamicCache"
ROUNDS, WARMUP, CALLS = 5, 1, 4  # turns of each cache, untimed ones before, tokens of a turn


@dataclass
class Measured:
    """Results of a run."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # rows by word; the uncompressed cache first
    failed: dict[str, str] = field(default_factory=dict)  # words that could not be measured, with why
    timings: Timings | None = None  # seconds of tokens, None where nothing could be timed
    count: int = 0  # windows


def run(
    task: TextTask,
    words: list[str],
    out: Path | None = None,
    progress: Progress | None = None,
    each: Callable[[Measured, str], None] | None = None,
) -> Measured:
    """Measure recipes on texts; the exact cache comes first, and tells which questions the model can answer.

    The record is written after every row, so that a run that was cut off goes on: rows are kept while neither the task
    nor weights, tables or the code have changed. `each` is called with the results so far and the latest row's word.

    Raises:
        AttachError: If no cache of ours serves the model.
        ValueError: If texts or a recipe cannot be read.
        MissingError: If there is no tokenizer.
    """
    for word in words:
        parse_recipe(word)  # raises before anything is loaded
    started, drawn = time.monotonic(), task.windows()
    weights = task.model.weights if out is not None or any(map(names_tables, words)) else None
    recipes = {NONE: Recipe()} | {word: parse_recipe(word, weights) for word in words}
    model = task.model.load()
    cache_for(model, Recipe(), mode="stock")  # raises where no cache of ours serves the model
    key = None if out is None else fingerprint((task, drawn.source, weights))
    before, found = rows_before(out, key), Measured(count=len(drawn.ids))
    told: Progress = progress or (lambda *_: None)
    total, kinds = len(recipes) * len(drawn.ids), None
    write = partial(_write, found, model, task, drawn, key, started, out)
    for place, (word, recipe) in enumerate(recipes.items()):
        step = partial(_step, told, place * len(drawn.ids), total, word)
        try:
            found.rows[word] = before.get(word) or named(measure(model, recipe, task, drawn, step, kinds), word)
        except Exception as error:  # a row may fail in any way a model can
            if word == NONE:
                raise
            found.failed[word] = _why(error)
            continue
        kinds = found.rows[NONE]["able"]
        changes(found.rows, NONE)
        if each is not None:
            each(found, word)
        write()
    told(total, total, "is done, timing")
    _time(found, recipes, model, task, drawn)
    write()
    return found


def _step(told: Progress, before: int, total: int, word: str, done: int, perplexity: float) -> None:
    told(before + done, total, f"{word}, perplexity {perplexity:.2f} so far")


def _why(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _time(found: Measured, recipes: Mapping[str, Recipe], model: Any, task: TextTask, drawn: TextWindows) -> None:
    """Time tokens of all caches in turn after the first context, and add them to the rows."""
    ids = drawn.ids[0]
    context, later = ids[:, : task.context], ids[:, task.context :]
    calls = max(min(CALLS, (later.shape[1] - 1) // (ROUNDS + WARMUP)), 1)

    def decoding(recipe: Recipe | None) -> Callable[[], None]:
        """Return what has a model, of the same weights, take one more token after the context."""
        other = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        if recipe is None:
            other.set_attn_implementation("sdpa")
            cache: Any = DynamicCache(config=other.config)
            with torch.no_grad():
                other(input_ids=context, **with_cache(other, cache))
        else:
            cache = cache_for(other, recipe)
            read_context(other, task.model.tokenizer, cache, context)
        tokens = iter(later.split(1, 1))

        @torch.no_grad()
        def step() -> None:
            other(input_ids=next(tokens), **with_cache(other, cache))

        step()
        return step

    run_of = {STOCK: decoding(None)}
    for word in list(found.rows):
        try:
            run_of[word] = decoding(recipes[word])
        except Exception as error:
            del found.rows[word]
            found.failed[word] = _why(error)
    turns: dict[str, Call | Turn] = {name: Turn(step, calls=calls) for name, step in run_of.items()}
    setting = Setting(torch.device(task.model.device), model.dtype)
    found.timings = take_turns(turns, ROUNDS, WARMUP, setting)
    taken = found.timings.cpu_seconds if setting.device.type == "cpu" else found.timings.seconds
    for word, row in found.rows.items():
        ratios = [own / stock for own, stock in zip(taken[word], taken[STOCK], strict=True)]
        row["token_seconds"], row["token_ratio"] = summary(taken[word]), summary(ratios)


def _write(
    found: Measured, model: Any, task: TextTask, drawn: TextWindows, key: str | None, started: float, out: Path | None
) -> None:
    if out is None:
        return
    device = torch.device(task.model.device)
    body = {
        "shapes": {
            "device": device.type,
            "model": task.model.name,
            "context": task.context,
            "following": FOLLOWING,
            "samples": len(drawn.ids),
            "clock": "cpu" if device.type == "cpu" else "wall",
            "parameters": sum(weight.numel() for weight in model.parameters()),
            **drawn.source,
        },
        "rounds": ROUNDS,
        "seed": task.seed,
        "seconds": round(time.monotonic() - started, 1),
        "rows": list(found.rows.values()),
        "failed": found.failed,
        "fingerprint": key,
        "load": None if found.timings is None else found.timings.load,
    }
    write_rows(BENCHMARK, Setting(device, model.dtype), body, out)


def held_share(row: Mapping[str, Any]) -> float:
    """Return the share of exact bytes that a row holds; of bytes in 16 bits where that is known."""
    return float(row["share"] if row["share_16"] is None else row["share_16"])


def method_of(word: str) -> str:
    """Return the names of the methods in a word, without settings."""
    return " | ".join(part.partition(":")[0] for part in word.split("|"))


@styled
def draw(record: Mapping[str, Any], picture: Path) -> None:
    """Draw whole answers, or perplexity where nothing was asked, as a PNG file; a color and marker for each method."""
    rows = record["rows"]
    what, said = "whole", "questions answered whole, 95 % interval"
    if any(row[what] is None for row in rows):
        what, said = "ratio", "perplexity by that of the exact cache, 95 % interval"
    figure, axes = new_figure(10.0, 4.6, 2)
    methods = list(dict.fromkeys(method_of(row["name"]) for row in rows if row["name"] != NONE))
    titles = "bytes held, share of an exact cache of 16 bits", "time of a token, DynamicCache = 1"
    for axis, title in zip(axes, titles, strict=True):
        first = rows[0][what]
        axis.axhspan(first["low"], first["high"], color=GREY, alpha=0.12, linewidth=0)
        axis.axhline(first["value"], color=INK, linewidth=1, linestyle="--")
        for row in rows:
            x = held_share(row) if axis is axes[0] else row["token_ratio"]["median"]
            place = None if row["name"] == NONE else methods.index(method_of(row["name"]))
            color = INK if place is None else OKABE_ITO[place % len(OKABE_ITO)]
            marker = MARKERS[0 if place is None else 1 + place % (len(MARKERS) - 1)]
            found = row[what]
            spread = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            sides = None
            if axis is axes[1]:
                ratio = row["token_ratio"]
                sides = [[ratio["median"] - ratio["q1"]], [ratio["q3"] - ratio["median"]]]
            name = "exact" if place is None else methods[place]
            shown = axis.get_legend_handles_labels()[1]
            point = {"marker": marker, "markersize": 6, "linewidth": 1, "color": color}
            point |= {"linestyle": "none", "label": None if name in shown else name}
            axis.errorbar([x], [found["value"]], spread, sides, **point)
        axis.set_xlabel(title)
        axis.set_xlim(left=0)
        if what == "whole":
            axis.set_ylim(0, 1.02)
    axes[0].set_ylabel(said)
    handles, names = axes[0].get_legend_handles_labels()
    columns = legend_columns(names, figure.get_figwidth(), 6)
    figure.set_figheight(figure.get_figheight() + 0.21 * (-(-len(names) // columns) - 1))  # or it would eat the axes
    figure.legend(handles, names, loc="outside lower center", ncols=columns)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DPI, metadata={"Software": None})

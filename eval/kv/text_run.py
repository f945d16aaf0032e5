"""Measure many recipes on texts: each alone, then seconds a token in turn; rows that fail are told.

Time is that of the same model with a `DynamicCache` and sdpa, in the same process.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from diffcache.eval.cost.interleave import Call, Timings, Turn, summary
from diffcache.eval.cost.interleave import measure as take_turns
from diffcache.eval.kv.sweep import fingerprint, rows_before, write_rows
from diffcache.eval.kv.text_task import FOLLOWING, Progress, TextTask, changes, measure
from diffcache.eval.kv.texts import TextWindows
from diffcache.eval.kv.words import NONE, names_tables, parse_recipe
from diffcache.eval.record import Setting
from diffcache.foreign import with_cache
from diffcache.kv.hf.cache import cache_for
from diffcache.kv.hf.questions import read_context
from diffcache.kv.recipe import Recipe

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
    """Measure recipes on texts; the model with an exact cache is first and says what it can answer.

    The record is written after every row, so that a run that was cut off goes on: rows are kept
    while neither the task nor the code of caches has changed.

    Raises:
        AttachError: If no cache of ours serves the model.
        ValueError: If texts or a recipe cannot be read.
        MissingError: If there is no tokenizer.
    """
    for word in words:
        parse_recipe(word)  # raises before anything is loaded
    started, drawn = time.monotonic(), task.windows()
    weights = task.model.weights if any(map(names_tables, words)) else None
    recipes = {NONE: Recipe()} | {word: parse_recipe(word, weights) for word in words}
    model = task.model.load()
    cache_for(model, Recipe(), mode="stock")  # raises where no cache of ours serves the model
    key = None if out is None else fingerprint((task, drawn.source, task.model.weights))
    before, found, told = rows_before(out, key), Measured(count=len(drawn.ids)), progress or _silent
    total, kinds = len(recipes) * len(drawn.ids), None
    for place, (word, recipe) in enumerate(recipes.items()):
        step = partial(_step, told, place * len(drawn.ids), total, word)
        try:
            found.rows[word] = before.get(word) or {**measure(model, recipe, task, drawn, step, kinds), "name": word}
        except Exception as error:  # a row may fail in any way a model can
            if word == NONE:
                raise
            found.failed[word] = _why(error)
            continue
        kinds = found.rows[NONE]["able"]
        changes(found.rows, NONE)
        if each is not None:
            each(found, word)
        if out is not None:
            _write(found, model, task, drawn, key, time.monotonic() - started, out)
    told(total, total, "is done, timing")
    _time(found, recipes, model, task, drawn)
    if out is not None:
        _write(found, model, task, drawn, key, time.monotonic() - started, out)
    return found


def _silent(done: int, total: int, following: str) -> None:
    """Tell nobody."""


def _step(told: Progress, before: int, total: int, word: str, done: int, perplexity: float) -> None:
    told(before + done, total, f"{word}, perplexity {perplexity:.2f} so far")


def _why(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@dataclass
class _Decoding:
    """A model and a cache that takes tokens one after the other."""

    model: Any  # model; shares its weights with those of the others
    cache: Any  # cache of a context
    tokens: Tensor  # tokens that follow, int64 [1, n]
    taken: int = 0  # tokens so far

    @torch.no_grad()
    def step(self) -> None:
        """Take one more token."""
        token = self.tokens[:, self.taken : self.taken + 1]
        self.model(input_ids=token, **with_cache(self.model, self.cache))
        self.taken += 1


def _time(found: Measured, recipes: Mapping[str, Recipe], model: Any, task: TextTask, drawn: TextWindows) -> None:
    """Time tokens of all caches in turn after the first context, and add them to the rows."""
    ids = drawn.ids[0]
    context, later = ids[:, : task.context], ids[:, task.context :]
    calls = max(min(CALLS, (later.shape[1] - 1) // (ROUNDS + WARMUP)), 1)

    def decoding(recipe: Recipe | None) -> _Decoding:
        other = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        if recipe is None:
            other.set_attn_implementation("sdpa")
            cache: Any = DynamicCache(config=other.config)
            with torch.no_grad():
                other(input_ids=context, **with_cache(other, cache))
        else:
            cache = cache_for(other, recipe)
            read_context(other, task.model.tokenizer, cache, context)
        made = _Decoding(other, cache, later)
        made.step()
        return made

    run_of: dict[str, _Decoding] = {STOCK: decoding(None)}
    for word in list(found.rows):
        try:
            run_of[word] = decoding(recipes[word])
        except Exception as error:
            del found.rows[word]
            found.failed[word] = _why(error)
    turns: dict[str, Call | Turn] = {name: Turn(each.step, calls=calls) for name, each in run_of.items()}
    setting = Setting(torch.device(task.model.device), model.dtype)
    found.timings = take_turns(turns, ROUNDS, WARMUP, setting)
    taken = found.timings.cpu_seconds if setting.device.type == "cpu" else found.timings.seconds
    for word, row in found.rows.items():
        ratios = [own / stock for own, stock in zip(taken[word], taken[STOCK], strict=True)]
        row["token_seconds"], row["token_ratio"] = summary(taken[word]), summary(ratios)


def _write(
    found: Measured, model: Any, task: TextTask, drawn: TextWindows, key: str | None, seconds: float, out: Path
) -> None:
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
        "seconds": round(seconds, 1),
        "rows": list(found.rows.values()),
        "failed": found.failed,
        "fingerprint": key,
        "load": None if found.timings is None else found.timings.load,
    }
    write_rows(BENCHMARK, Setting(device, model.dtype), body, out)

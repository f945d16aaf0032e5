"""Cost of recipes to a model that recalls facts: answers, perplexity, bytes, seconds; rows of a sweep."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffcache import kv
from diffcache.eval.kv.peer import PressPeer
from diffcache.eval.kv.recipe_words import NONE, parse_row, tables_digest, weights_digest
from diffcache.eval.metrics.intervals import share_interval
from diffcache.eval.record import Setting, check, envelope
from diffcache.eval.runs.sweep import read_values
from diffcache.files import read_json, write_json
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.layer import KVLayer
from diffcache.kv.life.on_request import compress_by_probe
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.score.most_attention import Asked
from diffcache.kv.slots import Slots
from diffcache.kv.view import View
from diffcache.pipelines.shipped_models import present
from diffcache.pipelines.small.recall import F0, RecallBatch, Task, draw, filler
from diffcache.pipelines.small.recall_llama import DIRECTORY, load
from diffcache.ranges import Count, Settings, Several

SHIPPED = "recall-llama"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FILLER_BLOCKS = 8  # of four tokens, on which perplexity is measured

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class KVTask(Settings):
    """Task of recall for a model whose cache follows a recipe.

    A context with facts is read, the cache is compressed while nobody knows what will be asked,
    and then each question is asked on a copy of the cache, token by token.
    """

    model: str = SHIPPED  # directory of a model trained on the task, or `recall-llama`
    context: int = 513  # tokens
    facts: int = 64  # number of facts in the context
    queries: int = 4  # number of questions about every context, each asked alone
    samples: Several = 64  # contexts; an interval needs two
    batch: Count = 16  # contexts at once
    seed: int = 0  # seed of the contexts and questions
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # dtype of the model, and so of an exact cache

    def check(self) -> None:
        """Raise ValueError unless contexts can be drawn."""
        if self.facts < self.queries:
            raise ValueError(
                f"facts={self.facts}: must be at least {self.queries}, as many different ones are asked for"
            )
        Task(self.context, self.facts, self.queries)

    @property
    def directory(self) -> Path:
        """The directory of the model; raises ValueError if there is none."""
        if self.model == SHIPPED:
            return present(DIRECTORY)
        directory = Path(self.model)
        if not (directory / "config.json").is_file():
            raise ValueError(f"model={self.model!r}: not a directory with a config.json; give one, or {SHIPPED!r}")
        return directory

    def load(self) -> nn.Module:
        """Return the model."""
        model: nn.Module = load(DTYPES[self.dtype], self.directory)
        return model

    def batches(self) -> Iterator[RecallBatch]:
        """Draw the contexts and questions, the same for every recipe."""
        task = Task(self.context, self.facts, self.queries)
        generator = torch.Generator().manual_seed(1 << 41 | self.seed)
        for start in range(0, self.samples, self.batch):
            yield draw(min(self.batch, self.samples - start), task, generator)


@torch.no_grad()
def measure(
    model: nn.Module, row: Recipe | PressPeer, task: KVTask, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the quality, the memory and the time of a recipe, or of a press that chooses the slots that stay.

    Returns:
        Shares of the answers with 95 % intervals: `whole`, with both tokens right; `lookup`, with the first right,
        which must be found in the context; `copy`, with the second right after the right first one. `hits` has them
        all, see `hits_of`. Greedy generation gives the same whole answers: it goes another way only where the first
        token is wrong already.

        `perplexity` of filler after the compressed context, `bytes` held for one context, `share` of those of an exact
        cache, `slots` a row, `read` (share of the slots held that a query reads), and seconds: `all`, `prefill` and
        `compress` of a context, `token` for each token that is asked of a batch. Seconds of a press of kvpress are
        those of our store, without what kvpress takes to choose.
    """
    found = _RecallFound()
    try:
        for number, batch in enumerate(task.batches()):
            cache = _read(model, _recipe(row, model, batch), batch, found.spent)
            found.hold(cache, batch)
            found.hits.append(_ask(model, cache, batch, found.spent))
            found.nats.append(_filler(model, cache, len(batch), task.seed + number))
            if progress is not None:
                progress(min((number + 1) * task.batch, task.samples), task.samples, row.name)
    finally:
        detach(model)
    return {"name": row.name or "none", **found.row(task.samples)}


def hits_of(row: Mapping[str, Any]) -> Tensor:
    """Return which tokens were right, bool [N, queries, 2]: of each context, question and answer.

    A record holds a context as text, `"11 10"` for a right answer and one whose second token is wrong.
    """
    return torch.tensor([[[bit == "1" for bit in one] for one in text.split()] for text in row["hits"]])


def _recipe(row: Recipe | PressPeer, model: nn.Module, batch: RecallBatch) -> Recipe:
    if isinstance(row, PressPeer):
        return row.recipe(model, batch.context)
    return row if row.retrieve is None else replace(row, retrieve=CountedReads(row.retrieve))


def exact_bytes(cache: KVCache, tokens: int) -> int:
    """Return the bytes that exact keys and values take for a number of tokens."""
    total = 0
    for layer in cache.store.layers:
        slots = layer.read()
        total += tokens * sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (slots.k, slots.v))
    return total


class CountedReads(Retriever):
    """Count the slots that single queries read through another retriever, and the slots held."""

    def __init__(self, inner: Retriever) -> None:
        self.inner = inner
        self.read = self.held = 0

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return the views of the other retriever."""
        views = self.inner.views(query, layer, others)
        if query.count == 1:
            self.held += _filled(layer.read())
            self.read += sum(_filled(view.slots) for view in views)
        return views


def _filled(slots: Slots) -> int:
    """Return the number of slots, over all heads, that hold a token."""
    return int(slots.valid.expand(slots.k.shape[:3]).sum())


class _RecallFound:
    """Measurements of the contexts so far."""

    def __init__(self) -> None:
        self.hits: list[Tensor] = []
        self.nats: list[Tensor] = []
        self.bytes = self.exact = self.slots = 0.0
        self.mode = ""
        self.counts: list[CountedReads] = []
        self.spent: dict[str, float] = defaultdict(float)  # seconds of `prefill`, `compress` and `token`, and `tokens`

    def hold(self, cache: KVCache, batch: RecallBatch) -> None:
        """Take note of what a compressed cache holds."""
        self.bytes += cache.nbytes
        self.exact += exact_bytes(cache, batch.context.shape[1])
        self.mode = cache.mode
        layers = cache.store.layers
        for layer in layers:
            slots = layer.read()
            self.slots += _filled(slots) / slots.k.shape[1] / len(layers)
        if isinstance(cache.store.recipe.retrieve, CountedReads):
            self.counts.append(cache.store.recipe.retrieve)

    def row(self, samples: int) -> dict[str, Any]:
        """Return the measurements of one context."""
        right = torch.cat(self.hits)  # [N, queries, 2]
        held, spent = sum(count.held for count in self.counts), self.spent
        return {
            "whole": share_interval(right.all(-1)).to_dict(),
            "lookup": share_interval(right[..., 0]).to_dict(),
            "copy": share_interval(right[..., 1]).to_dict(),
            "perplexity": float(torch.cat(self.nats).mean().exp()),
            "bytes": self.bytes / samples,
            "share": self.bytes / self.exact,
            "slots": self.slots / samples,
            "read": sum(count.read for count in self.counts) / held if held else 1.0,
            "mode": self.mode,
            "hits": [" ".join(f"{a}{b}" for a, b in one) for one in right.int().tolist()],
            "seconds": {
                "all": spent["prefill"] + spent["compress"] + spent["token"],
                "prefill": spent["prefill"] / samples,
                "compress": spent["compress"] / samples,
                "token": spent["token"] / max(spent["tokens"], 1),
            },
        }


def _read(model: nn.Module, recipe: Recipe, batch: RecallBatch, spent: dict[str, float]) -> KVCache:
    """Return the cache of a context, compressed."""
    cache = cache_for(model, recipe)
    started = time.perf_counter()
    model(input_ids=batch.context, **with_cache(model, cache))
    spent["prefill"] += time.perf_counter() - started
    started = time.perf_counter()
    if recipe.score == Asked():
        # The context itself is run once more, since its own queries are typical of it.
        compress_by_probe(cache, lambda fork: model(input_ids=batch.context, **with_cache(model, fork)))
    else:
        cache.settle()
    spent["compress"] += time.perf_counter() - started
    return cache


def _ask(model: nn.Module, cache: KVCache, batch: RecallBatch, spent: dict[str, float]) -> Tensor:
    """Return which answers are right, bool [B, queries, 2]."""
    found = []
    for number in range(batch.queries.shape[1]):
        words = batch.queries[:, number]
        copy, answers = cache.fork(), []
        for place in range(3):  # [Q], k, v1
            started = time.perf_counter()
            out = model(input_ids=words[:, place : place + 1], **with_cache(model, copy))
            spent["token"] += time.perf_counter() - started
            spent["tokens"] += 1
            answers.append(out.logits[:, -1].argmax(-1))
        found.append(torch.stack(answers[1:], -1) == words[:, 2:])
    return torch.stack(found, 1)


def _filler(model: nn.Module, cache: KVCache, rows: int, seed: int) -> Tensor:
    """Return the surprise of filler, nats a token."""
    walk = filler(rows, _FILLER_BLOCKS, torch.Generator().manual_seed(seed)).flatten(1)
    assert int(walk.min()) >= F0
    logits = model(input_ids=walk, **with_cache(model, cache.fork())).logits
    known = logits[:, :-1].float().log_softmax(-1)
    surprise: Tensor = -known.gather(2, walk[:, 1:, None]).flatten()
    return surprise


BENCHMARK = "kv-recall"
_TASK = {field.name for field in fields(KVTask)}


@dataclass(frozen=True)
class RecipeSweep:
    """Recipes to measure on one task."""

    task: KVTask  # task that every recipe is measured on
    families: Mapping[str, list[str]]  # words of recipes, by what they have in common

    def words(self) -> list[str]:
        """Return all words once, the uncompressed cache first."""
        return list(dict.fromkeys([NONE, *(w for words in self.families.values() for w in words)]))


def read_sweep(file: Path) -> RecipeSweep:
    """Read a sweep: many recipes at many budgets, in a TOML file.

        context = 513
        budgets = [0.5, 0.25, 0.125, 0.0625]

        [family.eviction]
        recipes = ["snapkv:budget={}", "keydiff:budget={}"]     # {} takes each budget in turn

    Raises FileNotFoundError if there is no such file, and ValueError if a key or a recipe in it is wrong.
    """
    found = read_values(file)
    budgets, families = found.pop("budgets", []), found.pop("family", {})
    unknown = sorted(set(found) - _TASK)
    if unknown:
        known = ", ".join(sorted(_TASK | {"budgets", "family"}))
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; use {known}")
    if not families:
        raise ValueError(f"{file}: [family.NAME] with recipes = [...] is missing")
    if not isinstance(budgets, list) or not isinstance(families, dict):
        raise ValueError(f"{file}: budgets={budgets!r}: must be a list, and family={families!r} tables")
    spelled = {}
    for name, family in families.items():
        texts = family.get("recipes") if isinstance(family, dict) else None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{file}: [family.{name}]: recipes={texts!r}: must be a list of words")
        if not budgets and any("{}" in text for text in texts):
            raise ValueError(f"{file}: [family.{name}]: budgets = [...], which {{}} takes in turn, is missing")
        spelled[name] = [
            text.replace("{}", repr(budget)) for text in texts for budget in (budgets if "{}" in text else [None])
        ]
        for word in spelled[name]:
            parse_row(word)
    return RecipeSweep(KVTask(**found), spelled)


def run(sweep: RecipeSweep, out: Path | None = None, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Measure every recipe of a sweep that the record `out` does not have yet.

    The record is written after every row, so that a run that was cut off goes on. Rows are kept while neither the task
    nor the model's weights, their tables or the code have changed.
    """
    weights = weights_digest(sweep.task.directory)
    key = fingerprint((sweep.task, weights))
    rows = rows_before(out, key)
    wanted_rows = {word: parse_row(word, weights) for word in sweep.words() if word not in rows}
    model = sweep.task.load()
    for word, row in wanted_rows.items():
        rows[word] = named(measure(model, row, sweep.task, progress), word)
        _write(list(rows.values()), sweep, key, out)
    wanted = [rows[word] for word in sweep.words()]
    _write(wanted, sweep, key, out)
    return wanted


def _write(rows: list[dict[str, Any]], sweep: RecipeSweep, key: str, out: Path | None) -> None:
    """Write the measured rows with the task and the setting."""
    if out is None:
        return
    task, seconds = sweep.task, sum(row["seconds"]["all"] for row in rows)
    body = {"shapes": {"device": "cpu", **asdict(task)}, "rounds": 1, "seed": task.seed}
    body |= {"seconds": seconds, "rows": rows}
    body |= {"fingerprint": key, "families": dict(sweep.families)}
    write_rows(BENCHMARK, Setting(torch.device("cpu"), DTYPES[task.dtype]), body, out)


def write_rows(benchmark: str, setting: Setting, body: dict[str, Any], out: Path, *libraries: str) -> None:
    """Write the record of a command.

    `body` has at least `shapes`, `rounds`, `seconds`, `rows` and `seed`; versions of `libraries` count, too.
    """
    record = envelope(benchmark, setting, shlex.join(["diffcache", *sys.argv[1:]]), body)
    record["versions"] |= {name: importlib.metadata.version(name) for name in libraries}
    check(record)
    write_json(out, record)


def rows_before(out: Path | None, key: str | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a record by their words, none of one with another `fingerprint`, or of other tables."""
    record = None if out is None else read_json(out)
    if record is None or record.get("fingerprint") != key:
        return {}
    return {row["name"]: row for row in record["rows"] if row.get("tables") == tables_digest(row["name"])}


def named(row: dict[str, Any], word: str) -> dict[str, Any]:
    """Return a row under its word, with the digest of the tables that it was measured with."""
    tables = tables_digest(word)
    return {**row, "name": word} | ({} if tables is None else {"tables": tables})


def fingerprint(task: object) -> str:
    """Return a digest of a task, by its `repr`, and of the code that measures and of caches."""
    found = hashlib.sha256(repr(task).encode())
    folders = Path(str(kv.__file__)).parent, Path(__file__).parent
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]

"""Make a part of the samples of a record again, by the code that made all of them.

Samples are those of the record: the same prompts, the same noise. Where a record keeps a value for each sample, the
two are compared one by one; so they are where all or none of its samples are right. Older records keep only an
interval, and then the published number must lie within twice the width of the interval of the part that was made
again, as many numbers are looked at. A batch is one computation: a sample drawn beside other samples is rounded
differently, which moves a picture by some tenths of a dB, so that the comparison is looser for such samples.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import diffcache
from diffcache.eval.demo import Task as DemoTask
from diffcache.eval.demo import compare
from diffcache.eval.kv import recall_cost, reuse, text_task
from diffcache.eval.kv.peer import PREFIX, installed
from diffcache.eval.kv.recipe_words import parse_recipe, parse_row, weights_digest
from diffcache.eval.kv.texts import TextModel
from diffcache.eval.methods import parse_method
from diffcache.eval.metrics.intervals import share_interval
from diffcache.eval.record import FOLDER, Row, Setting, some
from diffcache.eval.runs.measure import evaluate
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.sweep import read_sweep, read_values
from diffcache.eval.workshop.bench import judge, search, telling
from diffcache.eval.workshop.dllm import measure as dllm
from diffcache.eval.workshop.dllm.page import STEPS
from diffcache.eval.workshop.dllm.rows import rows as dllm_rows
from diffcache.eval.workshop.figures import REWARDS
from diffcache.eval.workshop.shipped import guarantee, quality, reach
from diffcache.eval.workshop.small.chain import WORLDS, draw, is_exact
from diffcache.eval.workshop.small.sticker_judge import LEAST_LIKENESS
from diffcache.features.base import Method
from diffcache.pipelines.small.recall import RecallBatch

Record = Mapping[str, Any]
Value = TypeVar("Value")
SETTING = Setting(torch.device("cpu"))
METHOD = "taylorseer"  # method of the demo
SOLE = ("exact_match", "taken", "answers")  # numbers whose rows keep values of nothing else
FEW = 2  # contexts, windows or prompts of each recipe
SHARE = 0.05
MANY = 20  # rows; of a record with more, one of each method is made again
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571)  # 97.5 % quantiles for 1 to 5 degrees of freedom
# How far values may be off on average, and what share of outcomes may differ, by whether the
# samples were drawn in the batches of the record.
WIDER = 1.0  # widening, as a share of the interval, on both sides together
SLACK = {True: (0.05, 0.02), False: (0.3, 0.1)}


@dataclass(frozen=True)
class Made:
    """Values of some samples of a published number, made again.

    Attributes:
        row: Name of its row.
        key: Name of the number in the row.
        published: The number with its interval, as the record has it.
        now: Values made now, a number a sample, or an outcome for each of its questions.
        kept: Values of the same samples in the record; None where it keeps none.
        alike: Whether they were made in the batches of the record.
    """

    row: str
    key: str
    published: Mapping[str, Any]
    now: Tensor
    kept: Tensor | None = None
    alike: bool = True

    def __post_init__(self) -> None:
        if self.kept is None and self.is_share and self.published["value"] in (0, 1):
            every = torch.full_like(self.now, bool(self.published["value"]))
            object.__setattr__(self, "kept", every)

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of what was made now."""
        if self.is_share:
            found = share_interval(self.now)
            return found.low, found.high
        table = (self.now if self.now.ndim == 1 else self.now.mean(1)).double()
        if len(table) == 1:
            return float(table), float(table)
        # Student's, as a bootstrap of a few samples is far too narrow.
        free = len(table) - 1
        width = STUDENT[free - 1] if free <= len(STUDENT) else 1.96 + 2.37 / free + 2.8 / free**2
        reach = width * float(table.std()) / len(table) ** 0.5
        return float(table.mean()) - reach, float(table.mean()) + reach

    @property
    def is_share(self) -> bool:
        """Return whether the values are outcomes."""
        return self.now.dtype == torch.bool

    @property
    def is_whole(self) -> bool:
        """Return whether the values made now are those that gave the published number."""
        return self.is_all and self._apart() < (1e-9 if self.is_share else 1e-3)

    @property
    def is_all(self) -> bool:
        """Return whether all samples of the published number were made."""
        return self.published.get("n") == len(self.now)

    @property
    def holds(self) -> bool:
        """Return whether the record still says what its code makes."""
        slack = SLACK[self.alike][self.is_share]
        if self.kept is None and self.is_all:
            return self._apart() <= slack
        if self.kept is None:
            low, high = self.interval
            spare = WIDER * (high - low) / 2  # many numbers of a record are looked at
            return low - spare <= float(self.published["value"]) <= high + spare
        apart = self.kept.double() - self.now.double()
        return bool(apart.abs().mean() <= slack)

    def _apart(self) -> float:
        return abs(float(self.now.double().mean()) - float(self.published["value"]))


Again = Callable[[Record, Sequence[Row], float, int], Iterator[Made]]


def _read(kept: Any, numbers: Sequence[int]) -> Tensor | None:
    """Return the values of samples that a record keeps, None where it keeps none."""
    if kept is None:
        return None
    some_of = [kept[number] for number in numbers]
    if isinstance(some_of[0], str):
        flags = [[sign == "1" for sign in one.replace(" ", "")] for one in some_of]
        return torch.tensor(flags).squeeze(1)
    return torch.tensor(some_of, dtype=torch.float64)


def _quality(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    for row in rows:
        numbers = some(row["samples"], share, seed)
        found, kept = quality.again(record, row, numbers), row.get("values", {})
        for key, now in found.items():
            published = row["quality"].get(key)
            if published is None or now.numel() == 0:
                continue
            before = _read(kept.get(key), numbers if len(now) == len(numbers) else range(len(now)))
            if before is not None and before.ndim == 2:  # streams are made from their beginning
                before = before[:, : now.shape[1]]
            elif key == "frame_right" and "chunks" in row and share < 1:
                continue  # the first frames of films differ from later ones
            yield Made(row["name"], key, published, now, before, alike=False)


def _methods(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Draw the first batch of a sweep again: a batch is one computation."""
    model, rows = record["task"]["model"], one_of_each(rows, seed)
    sweep = FOLDER / f"eval-{model}-methods.toml"
    wanted = {row["name"] for row in rows}
    there = importlib.util.find_spec("cache_dit") is not None
    tables = read_values(sweep)["method"]
    tables = [one for one in tables if there or not one["name"].startswith("cache-dit/")]
    with tempfile.TemporaryDirectory() as folder:
        (plan,) = read_sweep(sweep, Path(folder), {"method": tables})
        task = replace(plan.task, samples=plan.task.batch_size)
        methods = {name: method for name, method in plan.methods.items() if name in wanted}
        few = replace(plan, task=task, methods=methods, rounds=0, reward=REWARDS.get(model, ""))
        made = evaluate(few, Progress())
    assert made is not None
    now = {row["name"]: row["values"] for row in made["rows"]}
    for row in rows:
        for key, found in now.get(row["name"], {}).items():
            part = "fidelity" if key in row["fidelity"] else "quality"
            numbers = range(task.samples)
            fresh, kept = _read(found, numbers), _read(row.get("values", {}).get(key), numbers)
            assert fresh is not None
            yield Made(row["name"], key, row[part][key], fresh, kept)


def _reach(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    seeds = record["task"]["samples"] // 256
    policy = reach.Policy(seeds=seeds, numbers=some(256, share, seed))
    numbers = [256 * half + number for half in range(seeds) for number in policy.numbers]
    for row in one_of_each(rows, seed):
        if row["kind"] == reach.UNCACHED:
            drawn = policy.uncached()
        else:
            method = policy.method(row["name"])
            with diffcache.wrapped(policy.pipe, method):
                drawn = policy.draw(method)
        kept = _read(row["outcomes"]["success_rate"], numbers)
        yield Made(row["name"], "success_rate", row["quality"]["success_rate"], drawn.succeeded, kept)


class _Few(recall_cost.KVTask):
    """The first contexts of the task."""

    def batches(self) -> Iterator[RecallBatch]:
        """Draw all contexts of the first batch, and keep the first ones."""
        yield next(iter(super().batches())).take(list(range(self.samples)))


def _recall(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Ask about the first contexts: every recipe has code of its own, so that each of them runs.

    Recipes that draw noise for a batch are asked again about all of the first batch.
    """
    about = {field.name: record["shapes"][field.name] for field in dataclasses.fields(_Few)}
    task = _Few(**about)
    model, weights = task.load(), weights_digest(task.directory)
    for row in one_of_each(rows, seed):
        if row["name"].startswith(PREFIX) and installed() is None:
            continue
        for count in (FEW, task.batch):
            few = replace(task, samples=count)
            made = recall_cost.measure(model, parse_row(row["name"], weights), few)
            now, kept = recall_cost.hits_of(made).all(-1), recall_cost.hits_of(row)[:count].all(-1)
            if torch.equal(now, kept):
                break
        yield Made(row["name"], "whole", row["whole"], now, kept)


def _texts(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Ask about the first windows; the record keeps the answers of each."""
    shapes = record["shapes"]
    task = text_task.TextTask(TextModel(shapes["model"]), None, shapes["context"], shapes["samples"], record["seed"])
    drawn, model = task.windows(), task.model.load()
    drawn = replace(drawn, ids=drawn.ids[:FEW])
    weights = task.model.weights
    for row in rows:
        recipe = parse_recipe(row["name"], weights)
        made = text_task.measure(model, recipe, task, drawn, None, record["rows"][0]["able"])
        now, kept = (text_task.hits_of(one)[:FEW] for one in (made, row))
        yield Made(row["name"], "whole", row["whole"], now, kept)
        now, kept = (torch.tensor(one["nats"][:FEW], dtype=torch.float64) for one in (made, row))
        yield Made(row["name"], "perplexity", row["perplexity"], now, kept)


def _telling(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    numbers = some(record["shapes"]["samples"], share, seed)
    for row in rows:
        for key, now in telling.again(record, row, numbers).items():
            kept = _read(row.get("values", {}).get(key), numbers)
            yield Made(row["name"], key, row[key], now, kept, alike=False)


def _search(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Draw a batch again with the choices of the search, and methods that need no tables."""
    batches = some(record["shapes"]["samples"] // search.BATCH, share, seed)
    numbers = [search.BATCH * batch + place for batch in batches for place in range(search.BATCH)]
    for row, found in search.again(record, rows, batches):
        now = torch.tensor(found, dtype=torch.float64)
        yield Made(row["name"], "psnr_db", row["psnr_db"], now, _read(row["each"], numbers))


def _guarantee(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Draw some prompts with every setting again, and certify on all of them again."""
    matrix = {kind: np.array(each) for kind, each in record["psnr"].items()}
    fresh = {row["name"]: row for row in guarantee.rows_of(matrix)}
    for kind, each in matrix.items():
        numbers = some(len(each), share, seed)
        texts = guarantee.captions(len(each), 1 + (kind == "two objects"), record["seed"])
        now, _ = guarantee.closeness(texts, record["shapes"]["steps"], record["seed"], numbers)
        for row in rows:
            if row["kind"] == kind:
                same = fresh[row["name"]]["strayed"] == row["strayed"]
                published = {**row, "value": row["strayed"]}
                made = torch.from_numpy(now if same else np.full_like(now, np.nan))
                yield Made(row["name"], "strayed", published, made, torch.from_numpy(each[numbers]))


def _judge(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    numbers = some(record["shapes"]["samples"], share, seed)
    for row in rows:
        found = judge.likenesses(row["name"], numbers, record["seed"])
        now = torch.from_numpy(found >= LEAST_LIKENESS)
        yield Made(row["name"], "taken", row["taken"], now, _read(row.get("values"), numbers))


def _dllm(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    model, samples = record["shapes"]["model"], record["shapes"]["samples"]
    numbers, world = some(samples, share, seed), WORLDS[model]
    batch = draw(samples, world, torch.Generator().manual_seed(dllm.PROMPTS + record["seed"]))
    part = replace(batch, prompts=batch.prompts[numbers], answers=batch.answers[numbers])
    known = {row.name: row for row in dllm_rows(model)}
    for row in rows:
        (runner,) = dllm.runners(model, [known[row["name"]]], SETTING).values()
        now = is_exact(runner.answer(part.prompts).ids, part)
        kept = _read(row.get("values"), numbers)
        yield Made(row["name"], "exact_match", row["exact_match"], now, kept)


def _demo(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Draw all four pictures, which are one batch."""
    about, method = record["task"], parse_method(METHOD)
    assert isinstance(method, Method)
    made = compare(DemoTask(tuple(about["prompts"]), about["steps"], about["seed"]), method)
    kept = torch.tensor(record["psnr_db"], dtype=torch.float64)
    now = torch.tensor(made.psnr_db, dtype=torch.float64)
    yield Made(METHOD, "psnr_db", {"value": float(kept.mean())}, now, kept)


def _reuse(record: Record, rows: Sequence[Row], share: float, seed: int) -> Iterator[Made]:
    """Ask the first prompts again, behind those that read the documents."""
    about = {name: record["shapes"][name] for name in ("documents", "length", "questions")}
    few = max(len(some(record["shapes"]["requests"], share, seed)), FEW)
    model = TextModel(record["shapes"]["model"])
    task = reuse.ReuseTask(model, None, **about, requests=few, seed=record["seed"])
    made, _, _ = reuse.reuse(task, [row["name"] for row in rows])
    now = {row["name"]: row["values"] for row in made}
    for row in rows:
        fresh, kept = (_read(one, range(few)) for one in (now[row["name"]], row.get("values")))
        assert fresh is not None
        yield Made(row["name"], "answers", row["answers"], fresh, kept)


AGAIN: Mapping[str, Again] = {
    "*-quality": _quality,
    "eval-sticker-*-methods": _methods,
    "telling": _telling,
    "eval-reach-policy-methods": _reach,
    "kv-recall": _recall,
    "kv-smollm2": _texts,
    "guarantee": _guarantee,
    "search": _search,
    "judge": _judge,
    "dllm-chain-*": _dllm,
    "kv-reuse": _reuse,
    "demo": _demo,
}
# Share of the samples that are made again, where 5 % would take more than half a minute.
SHARES: Mapping[str, float] = {
    "sticker-flux-quality": 0.01,
    "sticker-kontext-quality": 0.03,
    "sticker-wan-quality": 0.02,
    "chain-llada-quality": 0.01,
    "dllm-chain-llada": 0.01,
    "dllm-chain-*": 0.02,
    "guarantee": 0.02,
    "telling": 0.04,
    "eval-reach-policy-methods": 0.01,
    "reach-policy-quality": 0.02,
}
# Records of times, bytes and errors alone -> why no part of them is made again: they are of their
# machine, and of the release that they name.
NOT_MADE: Mapping[str, str] = {
    "kernels": "times of a GPU",
    "overhead": "times of another machine",
    "kv": "times of another machine",
    "decode": "times of a machine without other work",
    "decode-4096": "as decode",
    "decode-smollm2": "as decode",
    "decode-smollm2-4096": "as decode",
    "capacity": "times; 40 minutes",
    **dict.fromkeys(STEPS, "times of steps"),
    "causal": "films of 80 chunks, judged whole: 40 minutes; sticker-causal-quality has those of the whole history",
}


def again_of(name: str) -> Again | None:
    """Return the function that makes a part of a record again; None where there is none."""
    return _found(AGAIN, name)


def share_of(name: str) -> float:
    """Return the share of a record's samples that are made again."""
    return _found(SHARES, name) or SHARE


def one_of_each(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return all rows of a record of few, and of one of many a row of each method, drawn by seed.

    A row is named by methods and their settings, such as `snapkv:budget=0.5|kivi:bits=4`.
    """
    if len(rows) <= MANY:
        return list(rows)
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kind = "|".join(word.partition(":")[0] for word in row["name"].split("|"))
        kinds.setdefault(kind, []).append(row)
    rng = np.random.default_rng(seed)
    return [alike[int(rng.integers(len(alike)))] for alike in kinds.values()]


def _found(table: Mapping[str, Value], name: str) -> Value | None:
    return next((value for pattern, value in table.items() if fnmatch(name, pattern)), None)

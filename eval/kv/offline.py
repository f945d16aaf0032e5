"""Data of the offline stages of recipes: contexts with questions, and what a model sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffcache.foreign import with_cache
from diffcache.kv.attend import Query, probabilities
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import Observation, observe
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.slots import Slots
from diffcache.kv.view import View
from diffcache.pipelines.small.recall import Task, draw

SEED = 3 << 41  # apart from those of every measurement
Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


@dataclass(frozen=True)
class SaidSpan:
    """Tokens behind a context that say again what stands in it.

    Attributes:
        said: Positions of the tokens whose outputs are to be the answer, int64 [n].
        start: Position of the answer in the context.
        stop: Position after its last token.
    """

    said: Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """A context, and what is asked of it.

    Attributes:
        ids: The context and the questions with their answers, int64 [1, T].
        context: Tokens of the context.
        answers: Answers to the questions.
    """

    ids: Tensor
    context: int
    answers: tuple[SaidSpan, ...]

    @property
    def prompt(self) -> Tensor:
        """The context alone, int64 [1, context]."""
        return self.ids[:, : self.context]


@dataclass(frozen=True)
class RecallSamples:
    """Contexts with facts, for recall-llama.

    Attributes:
        context: Tokens.
        facts: Facts in a context.
        count: Contexts.
        questions: Questions after each.
        seed: Seed of what is drawn.
    """

    context: int = 513
    facts: int = 64
    count: int = 16
    questions: int = 8
    seed: int = 0

    def each(self) -> Iterator[Sample]:
        """Draw them, one at a time."""
        drawn = torch.Generator().manual_seed(SEED | self.seed)
        task = Task(self.context, self.facts, self.questions)
        for _ in range(self.count):
            batch = draw(1, task, drawn)
            starts = (batch.facts[0, batch.asked[0]] + 2).tolist()
            pairs = zip(batch.answers, starts, strict=True)
            answers = (SaidSpan(place - 1, start, start + 2) for place, start in pairs)
            yield Sample(batch.ids, self.context, tuple(answers))

    def about(self) -> dict[str, Any]:
        """Return what they are."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TextSamples:
    """Contexts of text; behind each, spans of it are repeated.

    A question is a span's first tokens, the answer those that follow them in the context.

    Attributes:
        contexts: Contexts of equal length, each int64 [1, context].
        source: Facts about the texts, plain values.
        seed: Seed of the spans.
        questions: Spans behind each context.
        cue: Tokens of a span that ask.
        span: Tokens of a span that answer.
    """

    contexts: Sequence[Tensor]
    source: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    questions: int = 8
    cue: int = 8
    span: int = 8

    @property
    def context(self) -> int:
        """Tokens of a context."""
        return self.contexts[0].shape[1]

    @property
    def count(self) -> int:
        """Contexts."""
        return len(self.contexts)

    def each(self) -> Iterator[Sample]:
        """Draw the spans of one context after the other."""
        drawn = torch.Generator().manual_seed(SEED | self.seed)
        length = self.cue + self.span
        for ids in self.contexts:
            starts = torch.randint(1, self.context - length + 1, (self.questions,), generator=drawn).tolist()
            parts = [ids, *(ids[:, start : start + length] for start in starts)]
            first = [self.context + number * length + self.cue for number in range(self.questions)]
            answers = tuple(
                SaidSpan(torch.arange(at - 1, at - 1 + self.span), start + self.cue, start + length)
                for at, start in zip(first, starts, strict=True)
            )
            yield Sample(torch.cat(parts, 1), self.context, answers)

    def about(self) -> dict[str, Any]:
        """Return what they are."""
        names = ("context", "count", "seed", "questions", "cue", "span")
        return {name: getattr(self, name) for name in names} | dict(self.source)


@dataclass(frozen=True)
class Work:
    """A model, and contexts to measure it on.

    Attributes:
        model: Model of transformers; bases need linear key and value projections.
        samples: Contexts with questions.
        report: Callback for the progress.
    """

    model: Any
    samples: RecallSamples | TextSamples
    report: Report

    def each(self, what: str) -> Iterator[Sample]:
        """Yield the samples, and report how many were done."""
        for number, sample in enumerate(self.samples.each()):
            self.report(number, self.samples.count, what)
            yield sample
        self.report(self.samples.count, self.samples.count, what)


@dataclass(frozen=True)
class Prepared:
    """Tables.

    Attributes:
        kind: Kind of the tensors: `"table"`, or the class that they make together.
        tensors: Tensors by name.
        gives: Setting of the recipe -> the entries that it can be read from, one or several.
        about: Facts about how they were found, plain values.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    gives: Mapping[str, Sequence[str]]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SeenLayer:
    """Queries, keys and values of one layer of full attention: B rows of T tokens.

    Attributes:
        query: Queries [B, Hq, T, D], rotated.
        slots: Keys, rotated, and values [B, H, T, D].
    """

    query: Query
    slots: Slots

    def attention(self, places: Tensor) -> Tensor:
        """Return the attention of the queries at some places, int64 [n]: [B, Hq, n, T]."""
        first, last = int(places[0]), int(places[-1]) + 1
        assert torch.equal(places, torch.arange(first, last))
        part = self.query.narrow(first, last)
        ((_, _, found),) = probabilities(part, self.slots, part.count)
        return found.flatten(1, 2)


class Watch(Retriever):
    """Take note of queries, keys and values while a model reads, and change nothing."""

    def __init__(self) -> None:
        self.layers: list[SeenLayer] = []

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Note what is asked and held; read everything."""
        self.layers.append(SeenLayer(query, layer.rotated(layer.read())))
        return layer.views()


@torch.no_grad()
def seen_by(model: Any, ids: Tensor) -> list[SeenLayer]:
    """Return what every layer of full attention sees of tokens, int64 [B, T]."""
    watch = Watch()
    read(model, Recipe(retrieve=watch), ids)
    detach(model)
    return watch.layers


@torch.no_grad()
def read(model: Any, recipe: Recipe, ids: Tensor) -> KVCache:
    """Return the cache of tokens, int64 [B, T]; nothing is compressed yet."""
    cache = cache_for(model, recipe, mode="native")
    model(input_ids=ids, **with_cache(model, cache))
    return cache


def observations(cache: KVCache) -> list[Observation]:
    """Return every layer of a cache as scorers see it, without queries."""
    layers = cache.store.layers
    return [observe(layer, len(layers)) for layer in layers]

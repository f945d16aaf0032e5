"""Data of the offline stages of recipes: contexts with questions, and what a model sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from diffcache.foreign import attention_names, set_attention_names, with_cache
from diffcache.kv.attend import Query, probabilities
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.model import decoder_of
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import Observation, observe
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.slots import Slots
from diffcache.kv.view import View
from diffcache.pipelines.small.recall import Task, draw

SEED = 3 << 41  # torch reads 32 bits of it: measurements draw from the same streams, but other sizes
Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


@dataclass(frozen=True)
class SaidSpan:
    """Tokens behind a context that repeat a part of it."""

    said: Tensor  # positions of the tokens whose outputs are to be the answer, int64 [n]
    start: int  # position of the answer in the context
    stop: int  # position after its last token


@dataclass(frozen=True)
class Sample:
    """A context, and what is asked of it."""

    ids: Tensor  # the context and the questions with their answers, int64 [1, T]
    context: int  # tokens of the context
    answers: tuple[SaidSpan, ...]

    @property
    def prompt(self) -> Tensor:
        """The context alone, int64 [1, context]."""
        return self.ids[:, : self.context]


@dataclass(frozen=True)
class RecallSamples:
    """Contexts with facts, for recall-llama."""

    context: int = 513  # tokens
    facts: int = 64
    count: int = 16  # contexts
    questions: int = 8  # questions after each
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
    """

    contexts: Sequence[Tensor]  # contexts of equal length, each int64 [1, context]
    source: Mapping[str, Any] = field(default_factory=dict)  # facts about the texts, plain values
    seed: int = 0  # seed of the spans
    questions: int = 8  # spans behind each context
    cue: int = 8  # tokens of a span that ask
    span: int = 8  # tokens of a span that answer

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
    """A model, and contexts to measure it on."""

    model: Any  # model of transformers; bases need linear key and value projections
    samples: RecallSamples | TextSamples
    report: Report  # callback for the progress

    def each(self, what: str) -> Iterator[Sample]:
        """Yield the samples, and report how many were done."""
        for number, sample in enumerate(self.samples.each()):
            self.report(number, self.samples.count, what)
            yield sample
        self.report(self.samples.count, self.samples.count, what)


@dataclass(frozen=True)
class Prepared:
    """Tables."""

    kind: str  # kind of the tensors: `"table"`, or the class that they make together
    tensors: Mapping[str, Tensor]
    gives: Mapping[str, Sequence[str]]  # setting of the recipe -> the entries that it can be read from, one or several
    about: Mapping[str, Any] = field(default_factory=dict)  # facts about how they were found, plain values


@dataclass(frozen=True)
class SeenLayer:
    """Queries, keys and values of one layer of full attention: B rows of T tokens."""

    query: Query  # queries [B, Hq, T, D], rotated
    slots: Slots  # keys, rotated, and values [B, H, T, D]

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
    """Return the queries, keys and values in every layer of full attention for tokens, int64 [B, T]."""
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


@contextmanager
def attending(model: Any, name: str, attention: Callable[..., Any]) -> Iterator[None]:
    """Have a model attend by a function of transformers' form, registered under a name, with the masks of sdpa."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    before = attention_names(model)
    decoder_of(model).set_attn_implementation(name)  # type: ignore[operator]
    try:
        yield
    finally:
        set_attention_names(before)

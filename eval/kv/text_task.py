"""Cost of a recipe to any causal model, on texts of the user's own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kv.recall import exact_bytes
from diffcache.eval.kv.scoring import score
from diffcache.eval.kv.texts import TextModel, Windows, windows
from diffcache.eval.metrics.bootstrap import Interval, mean_interval
from diffcache.eval.metrics.intervals import share_interval
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.hf.questions import ask, read_context
from diffcache.kv.recipe import Recipe

Progress = Callable[[int, int, str], None]
_DRAWN = 1 << 20  # seeds of needles and spans, apart from that of the windows
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the needles in a context
CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Quito", "Delhi", "Seoul", "Rome", "Accra")
NEEDLE = "The secret number of {} is {}."
QUESTION = "The secret number of {} is"
SPANS, CUE, SPAN = 4, 8, 8  # repeated spans of a context, tokens that ask and that answer


@dataclass(frozen=True)
class TextTask:
    """Texts, and what is asked of them.

    Half of a window is the context, which is read and compressed; the other half follows.

    Attributes:
        model: The model with its tokenizer.
        texts: File or folder of texts.
        context: Tokens of a context.
        samples: Windows at most.
        seed: Seed of windows, needles and spans.
    """

    model: TextModel
    texts: Path
    context: int = 512
    samples: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context < 2 * (CUE + SPAN):
            raise ValueError(f"--context {self.context}: must be at least {2 * (CUE + SPAN)}")
        if self.samples < 2:
            raise ValueError(f"--samples {self.samples}: an interval needs at least 2")

    def windows(self) -> Windows:
        """Return the windows.

        Raises:
            ValueError: If texts are too short or too few, see `windows`.
        """
        return windows(self.model, self.texts, 2 * self.context, self.samples, 2, self.seed)


@dataclass(frozen=True)
class Needles:
    """A context with sentences that are looked for.

    Attributes:
        text: Text with the sentences in it.
        questions: Question for each of the sentences.
        numbers: The right answers.
    """

    text: str
    questions: tuple[str, ...]
    numbers: tuple[str, ...]

    @classmethod
    def draw(cls, text: str, seed: int) -> Needles:
        """Put a sentence into a text at each of `DEPTHS`, between its words.

        Args:
            text: The text.
            seed: Seed of cities and numbers.
        """
        drawn = random.Random(_DRAWN + seed)
        words = text.split(" ")
        cities = drawn.sample(CITIES, len(DEPTHS))
        numbers = [str(drawn.randrange(10_000, 100_000)) for _ in DEPTHS]
        places = [round(depth * len(words)) for depth in DEPTHS]
        for place, city, number in reversed(list(zip(places, cities, numbers, strict=True))):
            words.insert(place, NEEDLE.format(city, number))
        return cls(" ".join(words), tuple(map(QUESTION.format, cities)), tuple(numbers))

    def hits(self, answers: list[str]) -> list[bool]:
        """Return which answers begin with the right number and no other digit behind it."""
        found = []
        for answer, number in zip(answers, self.numbers, strict=True):
            said = answer.strip()
            found.append(
                said.startswith(number) and not said[len(number) : len(number) + 1].isdigit()
            )
        return found


def spells(tokenizer: Any) -> bool:
    """Return whether a tokenizer can write what needles say."""
    text = NEEDLE.format(CITIES[0], 12345)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return "12345" in tokenizer.decode(ids).replace(" ", "")


@dataclass
class _Found:
    """Measurements of the windows so far."""

    nats: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    needles: list[list[bool]] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    mode: str = ""


@torch.no_grad()
def measure(
    model: Any,
    recipe: Recipe,
    task: TextTask,
    drawn: Windows,
    step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Return what a recipe keeps of texts, and the bytes that it holds.

    Args:
        model: Model of transformers.
        recipe: Recipe of its cache.
        task: Task that the recipe is measured on.
        drawn: Windows of the task.
        step: Callback that is given the number of windows done, and their perplexity.

    Returns:
        With 95 % intervals over windows: `perplexity` of the second half after the compressed first
        half; `copy`, the share of right tokens where spans of the context are repeated behind it;
        `needle`, the share of right answers to questions for sentences that stand at five depths,
        None where the tokenizer cannot write them. `nats` of each window, `bytes` held for a
        context, `share` of those of exact keys and values, `mode`.

    Raises:
        AttachError: If the recipe cannot serve the model.
    """
    found, tokenizer = _Found(), task.model.tokenizer
    try:
        for number, ids in enumerate(drawn.ids):
            cache = cache_for(model, recipe)
            read_context(model, tokenizer, cache, ids[:, : task.context - 1])
            found.bytes.append(float(cache.nbytes))
            found.exact.append(float(exact_bytes(cache, task.context - 1)))
            found.mode = cache.mode
            last, *later = ids[0, task.context - 1 :].tolist()
            nats, _ = score(model, cache.fork(), last, later, recipe)
            found.nats.append(-nats.double().mean())
            hits = [
                score(model, cache.fork(), last, span, recipe)[1][CUE:]
                for span in spans(ids[0, : task.context - 1], task.seed + number)
            ]
            found.copies.append(torch.cat(hits))
            if spells(tokenizer):
                found.needles.append(_needle_hits(model, recipe, task, ids, number))
            if step is not None:
                step(number + 1, float(torch.stack(found.nats).mean().exp()))
    finally:
        detach(model)
    return {"name": recipe.name or "none", **_row(found)}


def spans(context: Tensor, seed: int) -> Iterator[list[int]]:
    """Draw spans of a context, int64 [T]: the tokens that ask, then those that answer."""
    generator = torch.Generator().manual_seed(_DRAWN + seed)
    starts = torch.randint(1, len(context) - CUE - SPAN + 1, (SPANS,), generator=generator)
    for start in starts.tolist():
        yield context[start : start + CUE + SPAN].tolist()


def _needle_hits(
    model: Any, recipe: Recipe, task: TextTask, ids: Tensor, number: int
) -> list[bool]:
    """Return which of the sentences in a window's context are found by greedy generation."""
    tokenizer = task.model.tokenizer
    text = tokenizer.decode(ids[0, : task.context], skip_special_tokens=True)
    needles = Needles.draw(text, task.seed + number)
    most = max(len(tokenizer(f" {x}", add_special_tokens=False).input_ids) for x in needles.numbers)
    answers = ask(
        model, tokenizer, needles.text, needles.questions, recipe,
        generate={"max_new_tokens": most + 2, "do_sample": False},
    )  # fmt: skip
    return needles.hits(answers)


def _row(found: _Found) -> dict[str, Any]:
    nats = torch.stack(found.nats)
    needle = None
    if found.needles:
        needle = share_interval(torch.tensor(found.needles)).to_dict()
    return {
        "perplexity": _perplexity(mean_interval(nats)).to_dict(),
        "copy": share_interval(torch.stack(found.copies)).to_dict(),
        "needle": needle,
        "needle_by_depth": [sum(row) / len(row) for row in zip(*found.needles, strict=True)],
        "bytes": sum(found.bytes) / len(found.bytes),
        "share": sum(found.bytes) / sum(found.exact),
        "mode": found.mode,
        "nats": nats.tolist(),
    }


def _perplexity(nats: Interval) -> Interval:
    """Return the perplexity of a mean of nats a token, with its interval."""
    return Interval(math.exp(nats.value), math.exp(nats.low), math.exp(nats.high), nats.n)


def changes(rows: Mapping[str, dict[str, Any]], first: str) -> None:
    """Give each row by how much its perplexity is that of the first row, paired over windows.

    Args:
        rows: Rows by name; `ratio` is added, with its interval.
        first: The name of the first row.
    """
    before = torch.tensor(rows[first]["nats"], dtype=torch.float64)
    for row in rows.values():
        change = mean_interval(torch.tensor(row["nats"], dtype=torch.float64) - before)
        row["ratio"] = _perplexity(change).to_dict()

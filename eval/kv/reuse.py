"""`diffcache kv reuse`: answers about documents read before, and the time to their first token."""

from __future__ import annotations

import copy
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import torch
import typer

from diffcache.command import Device, Seed, check_target, device_of, guarded
from diffcache.eval.cost.interleave import quartiles, summary
from diffcache.eval.methods import naming
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.eval.options import CausalModel, Texts
from diffcache.eval.record import Setting, values
from diffcache.pipelines.demo.console import print_rows, progress, quiet
from diffcache.registry import read_word

if TYPE_CHECKING:
    from diffcache.eval.kv.texts import TextModel
    from diffcache.kv.hf.documents import Answers, Documents

_Taken: TypeAlias = "tuple[Answers, list[bool], int]"  # answers, which are right, bytes held

NO_METHODS: list[str] = []
FULL = "recompute"
BENCHMARK = "kv-reuse"
SPARE = 2  # documents that a prompt leaves out
GENERATE = {"max_new_tokens": 6, "do_sample": False}


@dataclass(frozen=True)
class Request:
    """A prompt: documents in their order, and questions about some of them."""

    documents: tuple[str, ...]  # texts
    questions: tuple[str, ...]
    answers: tuple[str, ...]  # number that answers each


@dataclass(frozen=True)
class ReuseTask:
    """Documents of texts, each with a number to ask for, and prompts that draw from them."""

    model: TextModel
    texts: Path | None = None  # file or folder of texts; None for documentation of Python
    documents: int = 4  # documents of a prompt, out of two more
    length: int = 128  # tokens of a document
    requests: int = 8  # prompts
    questions: int = 2  # questions of a prompt
    seed: int = 0  # seed of documents, numbers and prompts

    def __post_init__(self) -> None:
        from diffcache.eval.kv.asked import CITIES

        most = len(CITIES) - SPARE
        if not 2 <= self.documents <= most:
            raise ValueError(f"--documents {self.documents}: must be from 2 to {most}")
        if self.requests < 2:
            raise ValueError(f"--requests {self.requests}: an interval needs at least 2")
        if not 1 <= self.questions <= self.documents:
            raise ValueError(f"--questions {self.questions}: must be from 1 to {self.documents}, one a document")
        if self.length < 16:
            raise ValueError(f"--length {self.length}: must be at least 16 tokens")

    def draw(self) -> tuple[list[Request], list[Request], dict[str, Any]]:
        """Return prompts that read every document once, those to measure, and the texts' source.

        Raises ValueError if texts are too few, or the tokenizer cannot write numbers.
        """
        from diffcache.eval.kv.asked import CITIES, NEEDLE, spells
        from diffcache.eval.kv.texts import windows
        from diffcache.kv.hf.questions import tokens_of

        if not spells(self.model.tokenizer):
            raise ValueError(
                f"--model {self.model.name}: its tokenizer cannot write the questions; take a "
                "model of language, such as smollm2"
            )
        count = self.documents + SPARE
        self.model.check_length(self.length, "--length")
        found = windows(self.model, self.texts, self.length, count, count, self.seed)
        drawn = random.Random(self.seed)
        names = drawn.sample(CITIES, count)
        numbers = [str(drawn.randrange(100, 1000)) for _ in names]
        texts = []
        for ids, name, number in zip(found.ids, names, numbers, strict=True):
            words = self.model.tokenizer.decode(ids[0], skip_special_tokens=True).split(" ")
            words.insert(drawn.randrange(len(words) + 1), NEEDLE.format(name, number))
            texts.append(" ".join(words))
        sizes = sorted(tokens_of(self.model.tokenizer, text).shape[1] for text in texts)
        need = sum(sizes[-self.documents :]) + 128  # of the longest documents, and what is beside
        self.model.check_length(need, f"--documents {self.documents} of --length {self.length}")

        def request(chosen: Sequence[int]) -> Request:
            asked = drawn.sample(list(chosen), self.questions)
            return Request(
                tuple(texts[place] for place in chosen),
                tuple(f"What is the secret number of {names[place]}?" for place in asked),
                tuple(numbers[place] for place in asked),
            )

        everything = list(range(count))
        first = [request(everything[: self.documents]), request(everything[SPARE:])]
        later = [request(drawn.sample(everything, self.documents)) for _ in range(self.requests)]
        return first, later, found.source


def reuse(
    task: ReuseTask, words: Sequence[str], told: Callable[..., None] | None = None
) -> tuple[list[dict[str, Any]], Setting, dict[str, Any]]:
    """Measure methods of `diffcache.kv.Documents` in turn, full recomputation first.

    Every document was read in two prompts before; the prompts that are measured draw some of them in another order.
    Recomputation uses a `DynamicCache` and the model's own attention. `words` are methods with settings, such as
    `cacheblend:share=0.3`; `told` is called with (done, total, name of the next).

    Returns rows, device and dtype, and facts about the texts; seconds are CPU seconds on a single thread of a CPU.
    Raises ValueError if a method or setting is unknown, or the texts are not suitable.
    """
    from diffcache.kv.hf import detach
    from diffcache.kv.hf.documents import Documents, settings_of

    read: dict[str, tuple[str, dict[str, Any]]] = {}
    for word in dict.fromkeys([FULL, *words]):
        with naming(f"--method {word}"):
            name, settings = read_word(word)
            read[word] = name.replace("-", "_"), settings
            settings_of(read[word][0], **settings)  # raises before anything is loaded
    first, later, source = task.draw()
    model, tokenizer = task.model.load(), task.model.tokenizer
    setting = Setting(torch.device(task.model.device), model.dtype)
    own = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    shelves: dict[str, Documents] = {}
    for word, (name, settings) in read.items():
        with naming(f"--method {word}"):
            clock = getattr(time, setting.clock)
            shelves[word] = Documents(own if name == FULL else model, tokenizer, name, clock=clock, **settings)
    taken: dict[str, list[_Taken]] = {word: [] for word in shelves}
    order, total = list(shelves), len(shelves) * (len(first) + len(later))
    try:
        for number, request in enumerate([*first, *later]):
            for place, word in enumerate(order):
                if told is not None:
                    told(number * len(order) + place, total, word)
                with naming(f"--method {word}"):
                    found = _ask(shelves[word], request)
                if number >= len(first):
                    taken[word].append(found)
            order.append(order.pop(0))  # another one is first in the next round
    finally:
        detach(model)
    return [_row(word, taken[word], taken[FULL]) for word in shelves], setting, source


def _ask(shelf: Documents, request: Request) -> _Taken:
    """Have a method answer a prompt."""
    given: dict[str, Any] = {"generate": GENERATE, "answer_prefix": "The secret number is"}
    found = shelf.ask(request.questions, request.documents, **given)
    said = [re.match(r"\D{0,3}(\d+)", text) for text in found.texts]
    hits = [one is not None and one[1] == right for one, right in zip(said, request.answers, strict=True)]
    return found, hits, shelf.nbytes


def _row(word: str, own: Sequence[_Taken], full: Sequence[_Taken]) -> dict[str, Any]:
    answers, hits, sizes = zip(*own, strict=True)
    plain, before, _ = zip(*full, strict=True)
    right, was_right = torch.tensor(hits), torch.tensor(before)
    change = None if own is full else share_change(was_right, right).to_dict()
    row = {"name": word, "answers": share_interval(right).to_dict(), "change": change, "values": values(right)}
    for name, key in (("first", "first_seconds"), ("all", "seconds")):
        mine, theirs = ([getattr(one, key) for one in some] for some in (answers, plain))
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        row |= {f"{name}_seconds": summary(mine), f"{name}_ratio": summary(ratios)}
    shares = [one.computed / one.tokens for one in answers]
    return row | {"computed": sum(shares) / len(shares), "bytes": max(sizes)}


@guarded
def command(
    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            metavar="NAME[:KEY=VALUE,...]",
            help="prefix, hydragen, concatenate, cacheblend, ape, cachecraft, kvshare or pie. May be repeated.",
            show_default="all",
        ),
    ] = NO_METHODS,
    model: CausalModel = "smollm2",
    texts: Texts = None,
    documents: Annotated[int, typer.Option(help="Documents of a prompt.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 128,
    requests: Annotated[int, typer.Option(help="Prompts.")] = 8,
    questions: Annotated[int, typer.Option(help="Questions of a prompt.")] = 2,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the record here (JSON).")] = None,
) -> None:
    """Ask about documents that were read before, and measure the time to the first token.

    As in retrieval-augmented generation: a prompt has some documents of a pool, in an order of its
    own, and questions behind them, whose answers stand in the documents. All documents were read
    before, in other prompts. "first token" is the time to that of the first answer, "all" that to
    the end of the last one, both by full recomputation of the same prompt, in turn: median and
    quartiles, of CPU time on one thread of a CPU; "computed" the share of the prompt before a
    question that was computed anew; "bytes" are held between prompts. prefix and hydragen are
    exact. In Python: diffcache.kv.Documents.

    [bold]Try[/bold]

        diffcache fetch smollm2

        diffcache kv reuse

        diffcache kv reuse --method cacheblend:share=0.3 --method cachecraft --documents 6

        diffcache kv reuse --model DIR --texts FILE --method prefix
    """
    from diffcache.eval.kv.command import spread
    from diffcache.eval.kv.recall_cost import write_rows
    from diffcache.eval.kv.texts import TextModel
    from diffcache.kv.hf.documents import methods
    from diffcache.run_report import human

    if out is not None:
        check_target("--out", out, (".json",))
    quiet()
    place = str(device_of(device))
    task = ReuseTask(TextModel(model, place), texts, documents, length, requests, questions, seed)
    started = time.monotonic()
    with progress("asking") as show:
        rows, setting, source = reuse(task, method or list(methods()), show)
    answered, taken = [], []
    for row in rows:
        change = "" if row["change"] is None else spread(row["change"], "+", 2)
        held = f"{row['computed']:.0%}", human(row["bytes"], "B")
        answered.append((row["name"], spread(row["answers"], places=2), change, *held))
        ratios = quartiles(row["first_ratio"]), quartiles(row["all_ratio"])
        taken.append((row["name"], f"{row['first_seconds']['median']:.3f} s", *ratios))
    print_rows(("", "answered", "change", "computed", "bytes"), answered)
    print_rows(("", "first token", "x recompute", "all, x recompute"), taken)
    prompts = f"{requests} prompts of {documents} documents of {length} tokens"
    typer.echo(f"{prompts}, {questions} questions each, {place}")
    if out is None:
        return
    shapes = {"device": place, "model": model, "documents": documents, "length": length}
    shapes |= {"requests": requests, "questions": questions, "clock": setting.clock, **source}
    seconds = round(time.monotonic() - started, 1)
    body = {"shapes": shapes, "rounds": requests, "seed": seed, "seconds": seconds}
    body |= {"rows": rows, "load": os.getloadavg()[0]}
    write_rows(BENCHMARK, setting, body, out)
    typer.echo(f"wrote {out}")

"""Cost of a recipe to any causal model, on texts of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kv.asked import Asked, Spelled, spells
from diffcache.eval.kv.recall import exact_bytes
from diffcache.eval.kv.scoring import score
from diffcache.eval.kv.texts import TextModel, TextWindows, windows
from diffcache.eval.metrics.bootstrap import Interval, mean_interval
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.questions import compress, feed
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.probe import Asked as Probed
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

    model: TextModel  # the model with its tokenizer
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
        """Return the windows.

        Raises:
            ValueError: If texts are too short or too few, see `windows`.
        """
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
    """Return what a recipe keeps of texts, and the bytes that it holds.

    `step` is given the number of windows done, and their perplexity. `kinds` of questions are asked, None for all,
    of which `able` then says those that the model answers in at least `FLOOR` of the cases.

    Returns:
        With 95 % intervals over windows: `perplexity` of what follows a compressed context; `copy`, the share of
        right tokens where spans of the context are repeated behind it; `whole`, the share of answers given whole to
        questions of the kinds in `able`, `kinds` for each kind, `aware` where each question was known to what
        compresses; None where the tokenizer cannot write them or the recipe looks at no queries. `nats` of each
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
    """Take note of the bytes of a compressed cache, and once of those it would have in 16 bits."""
    found.bytes.append(float(cache.nbytes))
    found.exact.append(float(exact_bytes(cache, tokens)))
    found.mode = cache.mode
    coded = recipe.codec is not None or bool(recipe.ladder)
    if len(found.bytes) == 1 and coded and not (recipe.rotates or recipe.wants_out):
        found.in_16_bits = _share_of_16_bits(cache, recipe, tokens)


def _share_of_16_bits(cache: KVCache, recipe: Recipe, tokens: int) -> float | None:
    """Return the share of exact bytes that a recipe holds of so many random tokens in 16 bits."""
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
    if found.aware:
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

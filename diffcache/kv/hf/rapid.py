"""RAPID: draft with the model itself, over the chunks of a prompt that match the question."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from diffcache.errors import AttachError
from diffcache.foreign import with_cache
from diffcache.kv.hf.drafts import Draft, Transfer
from diffcache.kv.hf.model import decoder_config, last_logits


class RAPID(Draft):
    """A draft that reads a short prompt, made of chunks of the long one; see `rapid`."""

    def __init__(self, model: Any, prompt: Tensor, long: Tensor, guesses: int) -> None:
        super().__init__(model, guesses)
        self.prompt, self.long = prompt.to(self.device), long.to(self.device)
        self.small: Any = None
        self.read: list[int] = []

    def start(self, ids: Tensor) -> Tensor:
        """Read what was verified and not read before."""
        length = self.long.shape[1]
        if not torch.equal(ids[:, :length], self.long):
            raise ValueError("input_ids: another prompt than the draft was made for; make a new one")
        wanted = [*self.prompt[0].tolist(), *ids[0, length:].tolist()]
        same = 0
        for one, other in zip(self.read, wanted[:-1], strict=False):
            if one != other:
                break
            same += 1
        for layer in self.small.layers if self.read else ():
            layer.keys, layer.values = layer.keys[:, :, :same], layer.values[:, :, :same]
        if not self.read:
            self.small = DynamicCache(config=decoder_config(self.model))
            if {type(layer) for layer in self.small.layers} != {DynamicLayer}:
                raise AttachError(
                    f"{type(self.model).__name__} has layers that are not of full attention, "
                    "whose tokens a draft cannot take back; use another model to draft"
                )
        self.read = wanted[:same]
        return self._forward(wanted[same:])

    def step(self, token: Tensor, position: int) -> Tensor:
        """Read a guess."""
        return self._forward([int(token)])

    def _forward(self, tokens: list[int]) -> Tensor:
        given = with_cache(self.model, self.small) | last_logits(self.model)
        out = self.model(input_ids=torch.tensor([tokens], device=self.device), **given)
        self.read += tokens  # `start` takes back what a forward that failed left beyond them
        logits: Tensor = out.logits[:, -1]
        return logits

    def transfer(self, strength: float) -> Transfer:
        """Return a processor for `logits_processor` by which the model learns from this draft.

        With it the tokens are no longer those without a draft.

        Args:
            strength: Step down the loss of distillation, the paper's eta; 0 changes nothing.
        """
        return Transfer(self, strength)


def overlap(chunks: Sequence[Tensor], question: Tensor) -> list[float]:
    """Return how well chunks of tokens match a question, by BM25 over tokens.

    Args:
        chunks: Tokens of each chunk, int64 [n].
        question: Tokens of the question, int64 [m].

    Reference: BM25, Robertson and Zaragoza 2009, with k1 = 1.2 and b = 0.75.
    """
    texts, words = [chunk.tolist() for chunk in chunks], set(question.tolist())
    mean = sum(map(len, texts)) / len(texts)
    found = [0.0] * len(texts)
    for word in words:
        counts = [text.count(word) for text in texts]
        having = len(texts) - counts.count(0)
        rare = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, count in enumerate(counts):
            long = 0.25 + 0.75 * len(texts[number]) / mean
            found[number] += rare * 2.2 * count / (count + 1.2 * long)
    return found


def rapid(
    model: nn.Module,
    ids: Tensor,
    question: int,
    *,
    keep: int = 512,
    chunk: int = 64,
    before: int = 0,
    score: Callable[[Sequence[Tensor], Tensor], Sequence[float]] = overlap,
    guesses: int = 8,
) -> RAPID:
    """Return a draft that reads the chunks of a prompt which its question asks for.

    Greedy tokens are those without a draft, and samples are of the same distribution, unless
    `RAPID.transfer` is used.

    Args:
        model: Model that drafts: the one that answers, or another of the same tokenizer.
        ids: The prompt, int64 [1, T].
        question: Last tokens of it that ask; all are kept.
        keep: Tokens of the chunks that are kept.
        chunk: Tokens of a chunk.
        before: First tokens that are kept, such as the beginning of a chat template.
        score: Function from chunks and the question, int64 [n] each, to a number for each chunk.
        guesses: Most tokens that are guessed at once.

    Raises:
        ValueError: If a number does not fit the prompt, or `score` gives too few or too many.

    Reference: RAPID, arXiv 2502.20330, not compared with its code. Departure: chunks are chosen by
    BM25 over tokens, where the paper embeds them with a model of its own; give that as `score`.
    """
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"ids={list(ids.shape)}: must be [1, T], one prompt")
    length = ids.shape[1]
    if question < 1 or before < 0 or before + question > length:
        raise ValueError(f"question={question}, before={before}: must fit the {length} tokens")
    if not 1 <= chunk <= keep:
        raise ValueError(f"keep={keep}, chunk={chunk}: must be one chunk of 1 or more at least")
    row = ids[0].cpu()
    context, asked = row[before : length - question], row[length - question :]
    chunks = list(context.split(chunk)) if len(context) else []
    worth = list(score(chunks, asked)) if chunks else []
    if len(worth) != len(chunks):
        raise ValueError(f"score: gave {len(worth)} numbers for {len(chunks)} chunks; give one each")
    order = sorted(range(len(chunks)), key=lambda number: -worth[number])
    chosen = sorted(order[: keep // chunk])
    parts = [row[:before], *(chunks[number] for number in chosen), asked]
    return RAPID(model, torch.cat(parts)[None], ids, guesses)

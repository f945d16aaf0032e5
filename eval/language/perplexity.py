"""Perplexity: of causal language models over a sliding window, a bound for masked diffusion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

CacheFactory = Callable[[], Any]


@dataclass(frozen=True)
class Perplexity:
    """How well a model foretells texts.

    Attributes:
        nats: Sum of the negative log-likelihoods of all scored tokens, natural logarithm.
        tokens: Scored tokens.
        n_bytes: UTF-8 bytes of the texts, None if they are not known.
    """

    nats: float
    tokens: int
    n_bytes: int | None = None

    @property
    def value(self) -> float:
        """Perplexity of a token, `exp(nats / tokens)`, dimensionless."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for every byte of text, which models with different tokenizers share."""
        return self.nats / (math.log(2) * self.n_bytes) if self.n_bytes else None

    def to_dict(self) -> dict[str, float | int | None]:
        """Return plain data for a record."""
        return {
            "value": self.value,
            "n": self.tokens,
            "nats": self.nats,
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass(frozen=True)
class Window:
    """One input of a model: its tokens, and the first of them that is scored."""

    text: int
    tokens: list[int]
    first: int


def windows(ids: Sequence[int], length: int, stride: int, text: int = 0) -> Iterator[Window]:
    """Yield windows of at most `length` tokens that score every token but the first once.

    Each window begins `stride` tokens after the one before and scores what that one did not reach.

    Args:
        ids: Tokens of one text.
        length: Largest input of the model in tokens.
        stride: Tokens between the beginnings of two windows, 1 to `length - 1`.
        text: Number of the text, handed through.
    """
    done = 1
    for begin in range(0, max(len(ids) - 1, 0), stride):
        end = min(begin + length, len(ids))
        yield Window(text, list(ids[begin:end]), done - begin)
        done = end
        if end == len(ids):
            return


@torch.inference_mode()
def text_nats(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    cache: CacheFactory | None = None,
) -> list[float]:
    """Return the negative log-likelihood of every text but its first token, in nats.

    Args:
        model: A transformers causal LM: `model(input_ids=, attention_mask=).logits`, `[B, T, V]`.
        texts: Token ids of each text, at least two.
        window: Largest input in tokens, at least 2.
        stride: Tokens between two windows; half a window by default.
        batch_size: Windows in a call; they are padded on the right and the padding is masked.
        cache: Makes `past_key_values` for a call, such as a KV recipe; None for no cache.

    Raises:
        ValueError: If a number is out of its range or a text is shorter than two tokens.
    """
    stride = max(window // 2, 1) if stride is None else stride
    _check_sizes(window, stride, batch_size)
    _check_texts(texts)
    device = next(iter(model.parameters())).device
    totals = [0.0] * len(texts)
    todo = (w for i, ids in enumerate(texts) for w in windows(ids, window, stride, i))
    while batch := list(islice(todo, batch_size)):
        longest = max(len(w.tokens) for w in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        scored = torch.full((len(batch), longest), -100)
        for row, w in enumerate(batch):
            size = len(w.tokens)
            ids[row, :size] = torch.tensor(w.tokens)
            mask[row, :size] = 1
            scored[row, w.first : size] = ids[row, w.first : size]
        more = {} if cache is None else {"past_key_values": cache(), "use_cache": True}
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device), **more}
        logits = model(**given).logits[:, :-1].float()
        target = scored[:, 1:].to(device)
        losses = cross_entropy(logits.transpose(1, 2), target, reduction="none")
        for w, loss in zip(batch, losses.double().sum(1).tolist(), strict=True):
            totals[w.text] += loss
    return totals


def causal_perplexity(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    cache: CacheFactory | None = None,
) -> Perplexity:
    """Return the perplexity of a causal LM over texts; every token weighs the same.

    The first token of a text is foretold from the tokenizer's beginning-of-sequence token where it
    has one, and not scored where it has none.

    Args:
        model: A transformers causal LM.
        tokenizer: Its tokenizer.
        texts: Texts, scored one by one.
        window: Largest input in tokens.
        stride: Tokens between two windows; half a window by default.
        batch_size: Windows in a call.
        cache: Makes `past_key_values` for a call.

    Raises:
        ValueError: If there is no text, or one has nothing to score.
    """
    if isinstance(texts, str) or not texts:
        raise ValueError(f"texts={texts!r}: must be a list of at least one text")
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [begin + list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    nats = text_nats(model, ids, window=window, stride=stride, batch_size=batch_size, cache=cache)
    scored = sum(len(tokens) - 1 for tokens in ids)
    return Perplexity(math.fsum(nats), scored, sum(len(text.encode()) for text in texts))


@torch.inference_mode()
def diffusion_nats(
    logits: Callable[[Tensor], Tensor],
    ids: Tensor,
    mask_id: int,
    *,
    prompt: int = 0,
    mc_num: int = 128,
    batch_size: int = 16,
    seed: int = 0,
) -> float:
    """Return a Monte-Carlo bound on the negative log-likelihood of a text, in nats.

    The mean of `1/t * sum over masked i of -log p(x_i | x_t)` over noise levels t, at which each
    token behind the prompt is masked (LLaDA, arXiv 2502.09992, equations 3 and 6). As in its
    evaluation code, `t = m / L` with the number m of masked tokens out of L drawn from 1 to L,
    stratified over the draws, which has less variance than independent masks.

    Args:
        logits: `[B, T]` tokens -> `[B, T, V]` logits of the token at each place.
        ids: Tokens `[T]`.
        mask_id: Token that stands for a masked one; its own logit is left as the model gives it.
        prompt: First tokens that are never masked and not scored.
        mc_num: Draws; with fewer than 128 the bound is noisy.
        batch_size: Draws in a call.
        seed: Of the draws; the same seed gives the same number.

    Raises:
        ValueError: If a number is out of its range, or nothing is left to score.
    """
    length = ids.shape[-1] - prompt
    if ids.ndim != 1 or prompt < 0 or length < 1:
        raise ValueError(
            f"ids {list(ids.shape)} with prompt={prompt}: must be [T] with more tokens than prompt"
        )
    if mc_num < 1 or batch_size < 1:
        raise ValueError(f"mc_num={mc_num}, batch_size={batch_size}: must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    start = float(torch.rand((), generator=generator))
    levels = [int((k + start) / mc_num * length) % length + 1 for k in range(mc_num)]
    total = 0.0
    for first in range(0, mc_num, batch_size):
        counts = torch.tensor(levels[first : first + batch_size])
        order = torch.rand(len(counts), length, generator=generator).argsort(1).argsort(1)
        masked = torch.zeros(len(counts), ids.shape[0], dtype=torch.bool)
        masked[:, prompt:] = order < counts[:, None]
        masked = masked.to(ids.device)
        noisy = torch.where(masked, torch.tensor(mask_id, device=ids.device), ids)
        scores = logits(noisy).float().transpose(1, 2)
        targets = ids.expand(len(counts), -1).to(scores.device)
        losses = cross_entropy(scores, targets, reduction="none")
        sums = (losses * masked.to(losses.device)).double().sum(1).cpu()
        total += float((sums * length / counts).sum())
    return total / mc_num


def diffusion_perplexity(
    logits: Callable[[Tensor], Tensor],
    texts: Sequence[Tensor],
    mask_id: int,
    *,
    mc_num: int = 128,
    batch_size: int = 16,
    seed: int = 0,
) -> Perplexity:
    """Return an upper bound on the perplexity of a masked diffusion LM; see `diffusion_nats`.

    Args:
        logits: `[B, T]` tokens -> `[B, T, V]` logits.
        texts: Tokens `[T]` of each text.
        mask_id: Token that stands for a masked one.
        mc_num: Draws for each text.
        batch_size: Draws in a call.
        seed: Of the first text; text i uses `seed + i`.

    Raises:
        ValueError: If there is no text, or a number is out of its range.
    """
    if not len(texts):
        raise ValueError("texts is empty: pass the tokens of at least one text")
    nats = [
        diffusion_nats(
            logits, ids, mask_id, mc_num=mc_num, batch_size=batch_size, seed=seed + number
        )
        for number, ids in enumerate(texts)
    ]
    return Perplexity(math.fsum(nats), sum(ids.shape[0] for ids in texts))


def _check_sizes(window: int, stride: int, batch_size: int) -> None:
    if window < 2:
        raise ValueError(f"window={window}: must be at least 2 tokens")
    if not 1 <= stride < window:
        raise ValueError(
            f"stride={stride}: must be 1 to window - 1 = {window - 1}, so that every token has "
            "one before it"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")


def _check_texts(texts: Sequence[Sequence[int]]) -> None:
    for number, ids in enumerate(texts):
        if len(ids) < 2:
            raise ValueError(
                f"text {number} has {len(ids)} token(s): at least 2 are needed to score one"
            )

"""Language models as tasks see them: causal ones with a KV cache, and masked diffusion ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.eval.language.perplexity import diffusion_nats, text_nats


class Language(Protocol):
    """What the adapter needs of a language model."""

    tokenizer: Any

    def generate(self, prompts: list[str], max_new_tokens: int, stop: list[str]) -> list[str]:
        """Return greedy continuations, with whatever follows a stop string still on."""

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood in nats, and whether greedy decoding gives it."""

    def rolling(self, ids: list[int]) -> float:
        """Return the log-likelihood of a whole text in nats."""


class Diffusion(Protocol):
    """A wrapped diffusion language model."""

    def generate(self, prompts: list[str], max_new_tokens: int, stop: list[str]) -> list[str]:
        """Return one continuation for each prompt."""

    def logits(self, ids: Tensor) -> Tensor:
        """Return `[B, T, V]` logits of the token at each place of `[B, T]` tokens."""


@dataclass
class CausalLanguage:
    """A transformers causal LM, with a cache of its own for every call.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        cache: Makes `past_key_values` for a call, such as a KV recipe; None: the model's default.
        batch_size: Prompts in a call; they are padded on the left.
        window: Largest input in tokens; by default what the model's configuration says.
    """

    model: Any
    tokenizer: Any
    cache: Callable[[], Any] | None = None
    batch_size: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        self.window = self.window or getattr(self.model.config, "max_position_embeddings", 2048)
        assert self.window is not None
        if self.window < 2:
            raise ValueError(f"window={self.window}: must be at least 2 tokens")

    @torch.inference_mode()
    def generate(self, prompts: list[str], max_new_tokens: int, stop: list[str]) -> list[str]:
        """Return greedy continuations; a row ends at a stop string or the end of text."""
        texts: list[str] = []
        for first in range(0, len(prompts), self.batch_size):
            texts += self._batch(prompts[first : first + self.batch_size], max_new_tokens, stop)
        return texts

    def _batch(self, prompts: list[str], max_new_tokens: int, stop: list[str]) -> list[str]:
        assert self.window is not None
        room = self.window - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} leaves no room for a prompt in a window of "
                f"{self.window} tokens"
            )
        rows = [prefixed(self.tokenizer, text)[-room:] for text in prompts]
        longest = max(map(len, rows))
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        pad = next((token for token in (pad, end) if token is not None), 0)
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])

        def stopped(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
            ends = [any(s in self._text(row[longest:]) for s in stop) for row in tokens]
            return torch.tensor(ends, device=tokens.device)

        made = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=end,
            stopping_criteria=[stopped] if stop else None,
            **({} if self.cache is None else {"past_key_values": self.cache()}),
        )
        return [self._text(row[longest:]) for row in made]

    def _text(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    @torch.inference_mode()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the exact log-likelihood in nats, and whether greedy decoding gives it."""
        assert self.window is not None
        if len(continuation) >= self.window:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit into a window of "
                f"{self.window} tokens with one before it"
            )
        ids = torch.tensor([(context + continuation)[-self.window :]], device=self.model.device)
        more = {} if self.cache is None else {"past_key_values": self.cache(), "use_cache": True}
        logits = self.model(input_ids=ids, **more).logits[0, -len(continuation) - 1 : -1].float()
        target = ids[0, -len(continuation) :]
        chosen = logits.log_softmax(-1).gather(1, target[:, None])
        return float(chosen.double().sum()), bool((logits.argmax(-1) == target).all())

    def rolling(self, ids: list[int]) -> float:
        """Return the log-likelihood of a text in nats, over windows with half of them as context.

        The harness' own models use disjoint windows, which differ where a text is longer than one.
        """
        assert self.window is not None
        tokens = [prefix_id(self.tokenizer), *ids]
        return -text_nats(self.model, [tokens], window=self.window, cache=self.cache)[0]


@dataclass
class DiffusionLanguage:
    """A wrapped masked diffusion LM; log-likelihoods are Monte-Carlo lower bounds.

    Args:
        model: What generates and gives logits.
        tokenizer: Its tokenizer.
        mask_id: Token that stands for a masked one.
        mc_num: Draws for each log-likelihood.
        batch_size: Draws in a call.
        seed: Of the draws.
    """

    model: Diffusion
    tokenizer: Any
    mask_id: int
    mc_num: int = 128
    batch_size: int = 16
    seed: int = 0

    def generate(self, prompts: list[str], max_new_tokens: int, stop: list[str]) -> list[str]:
        """Return the model's continuations.

        Raises:
            DiffcacheError: If there are not as many as prompts.
        """
        texts = list(self.model.generate(prompts, max_new_tokens, stop))
        if len(texts) != len(prompts):
            raise DiffcacheError(
                f"generate returned {len(texts)} texts for {len(prompts)} prompts: must be as many"
            )
        return texts

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the bound in nats, and whether unmasking the surest token first gives it."""
        ids = torch.tensor(context + continuation)
        return -self._nats(ids, len(context)), self._is_greedy(ids, len(context))

    def rolling(self, ids: list[int]) -> float:
        """Return the bound of a whole text in nats."""
        return -self._nats(torch.tensor(ids), 0)

    def _nats(self, ids: Tensor, prompt: int) -> float:
        return diffusion_nats(
            self.model.logits, ids, self.mask_id, prompt=prompt, mc_num=self.mc_num,
            batch_size=self.batch_size, seed=self.seed,
        )  # fmt: skip

    @torch.inference_mode()
    def _is_greedy(self, ids: Tensor, prompt: int) -> bool:
        now = ids.clone()
        now[prompt:] = self.mask_id
        left = torch.arange(len(ids)) >= prompt
        while left.any():
            sure, best = self.model.logits(now[None])[0].float().cpu().softmax(-1).max(-1)
            place = int(sure.masked_fill(~left, -1.0).argmax())
            if best[place] != ids[place]:
                return False
            now[place], left[place] = ids[place], False
        return True


def prefix_id(tokenizer: Any) -> int:
    """Return the token in front of a text without context.

    Raises:
        ValueError: If the tokenizer has neither a beginning nor an end token.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has no bos_token and no eos_token to begin a text with")


def prefixed(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, with those that the tokenizer adds in front."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    begin = tokenizer.bos_token_id
    return ids if begin is None and ids else [prefix_id(tokenizer), *ids]


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of what follows it.

    Both are encoded together and parted; white space at the end of the context goes with the
    continuation, as in the harness.

    Raises:
        ValueError: If nothing is left to score.
    """
    bare = context.rstrip()
    whole = prefixed(tokenizer, context + continuation)
    size = len(prefixed(tokenizer, bare)) if bare else 1
    size = size if bare or tokenizer.bos_token_id is not None else 0
    before, after = whole[:size], whole[size:]
    if not after:
        raise ValueError(f"continuation={continuation!r}: has no token of its own to score")
    return before or [prefix_id(tokenizer)], after

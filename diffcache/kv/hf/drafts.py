"""Draft tokens with the model itself, which reads little of a prompt, for assisted decoding.

`model.generate(**inputs, past_key_values=cache, assistant_model=triforce(model, cache))` says what
it says without a draft, in fewer forwards over the long prompt. A draft has what transformers asks
of an assistant; it is no model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from diffcache.foreign import device_of_model
from diffcache.method import check_int


class Draft(ABC):
    """An assistant of transformers that guesses what a model says next.

    Args:
        model: Model that guesses.
        guesses: Most tokens that are guessed at once. The first round, which reads the prompt,
            guesses none; then transformers' heuristic asks for two more where all were right.
    """

    def __init__(self, model: Any, guesses: int) -> None:
        check_int("guesses", guesses, 1)
        self.model, self.guesses, self.config = model, guesses, model.config
        self.device = device_of_model(model)
        self.generation_config = deepcopy(model.generation_config)
        self.generation_config.num_assistant_tokens = 0
        self.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
        self.generation_config.assistant_confidence_threshold = 0.0
        self.said: dict[int, Tensor] = {}  # scores of what follows so many tokens, [1, V]

    def _supports_logits_to_keep(self) -> bool:
        return True

    @abstractmethod
    def start(self, ids: Tensor) -> Tensor:
        """Return the logits [1, V] of what follows verified ids, int64 [1, T]."""

    @abstractmethod
    def step(self, token: Tensor, position: int) -> Tensor:
        """Return the logits of what follows a guess, int64 [1, 1]: [1, V]."""

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        generation_config: Any,
        max_new_tokens: int,
        logits_processor: Sequence[Any] = (),
        **others: Any,
    ) -> Any:
        """Return guesses and their scores, as `generate` of a model does."""
        if len(input_ids) != 1:
            raise ValueError(f"input_ids={list(input_ids.shape)}: drafts are of one row")
        ends = generation_config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        ids, scores = input_ids, []
        self.said.clear()
        logits = self.start(ids)
        count = min(max_new_tokens, self.guesses)
        for number in range(count):
            score = logits.float()
            for each in logits_processor:
                score = score if isinstance(each, Transfer) else each(ids, score)
            token = score.argmax(-1, keepdim=True)
            if generation_config.do_sample:
                token = torch.multinomial(score.softmax(-1), 1)
            self.said[ids.shape[1]] = score
            scores.append(score)
            ids = torch.cat([ids, token], 1)
            if number + 1 == count or int(token) in ends:
                break
            logits = self.step(token, ids.shape[1] - 1)
        return SimpleNamespace(sequences=ids, scores=tuple(scores), cache=None, past_key_values=None)


class Transfer(LogitsProcessor):  # type: ignore[misc]
    """Move logits towards the distribution of a draft: `z + strength (q - p)`.

    Reference: RAPID, arXiv 2502.20330, its inference-time knowledge transfer, at temperature 1.
    """

    def __init__(self, draft: Draft, strength: float) -> None:
        if not 0 <= strength < math.inf:
            raise ValueError(f"strength={strength}: must be 0 or more")
        self.draft, self.strength = draft, strength

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [1, V], moved where the draft has said something."""
        drafted = self.draft.said.get(input_ids.shape[1])
        if drafted is None:
            return scores
        return scores + self.strength * (drafted.softmax(-1) - scores.softmax(-1))

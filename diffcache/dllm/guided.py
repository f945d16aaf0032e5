"""Guided Diffusion: a small autoregressive model says how much of a draft is committed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diffcache.dllm.rules import Rule, first
from diffcache.ranges import Count, Share


class Guide(Protocol):
    """Scores drafts as an autoregressive model.

    Attributes:
        rows: Rows that it computed, of all sequences and forwards together.
    """

    rows: int

    def __call__(self, ids: Tensor, at: Tensor, wanted: Tensor, valid: Tensor | None) -> Tensor:
        """Return the logits by which it would choose tokens, `[B, n, V]`.

        Args:
            ids: Tokens with the draft in them, int64 `[B, T]`.
            at: Positions of the active blocks, int64 `[B, n]`.
            wanted: Mask of the positions whose logits are asked for, bool `[B, n]`; at least one.
            valid: Positions that are no padding, bool `[B, T]`; None for all.
        """


@dataclass(frozen=True)
class Guided(Rule):
    """Commit the draft from the left for as long as an autoregressive model agrees with it.

    A step drafts the most probable token of every mask. The guide agrees with a token that is among
    its `k` most probable ones, and at least `ratio` times as probable as its best one. The tokens
    before the first disagreement are committed, all of them chosen by the diffusion model; at least
    one is. An answer ends with the first end token that is committed.

    Goes with any cache. `FreeCache()` freezes what the last step of a block commits with the keys
    and values of its masks, here often many tokens: use `FreeCache(commit=True)`.

    Departures: a draft ends with the active block, so that any cache may be used with it; use
    `block=None` for drafts of the whole answer. The guide reads the tokens of the diffusion model,
    so that both need one vocabulary; the published code also translates between two. It scores a
    draft in one call, where the published code stops at the first chunk of 32 tokens with a
    disagreement. The published script that commits the guide's own token is left out.

    Args:
        k: Number of the guide's most probable tokens that it agrees with; 1 for its best one alone,
            the published code's `deterministic`, and 2 for its `topk_relative`.
        ratio: Least probability, as a share of the best one's, 0 to 1.

    Reference: FlashDLM (Guided Diffusion), arXiv 2505.21467, and its released code.
    """

    k: Count = 2
    ratio: Share = 0.5

    def scores(self, draft: Tensor, logits: Tensor, candidates: Tensor, ends: Tensor) -> Tensor:
        """Return 1 for the candidates of a draft, `[B, n]`, that are accepted, 0 for the others, -inf elsewhere.

        By the guide's logits for it, `[B, n, V]`; nothing is accepted after positions where it ends.
        """
        chosen = logits.gather(-1, draft[..., None])
        least = math.log(self.ratio) if self.ratio else -math.inf
        agrees = ((logits > chosen).sum(-1) < self.k) & (chosen[..., 0] - logits.amax(-1) >= least)
        goes_on = (agrees | ~candidates) & ~ends
        before = goes_on.cumprod(-1).roll(1, dims=-1).bool()
        before[:, 0] = True
        return (before & agrees).double().masked_fill(~candidates, -math.inf)

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the accepted candidates, or the leftmost one."""
        return (scores > 0) | first(scores, 1)

"""Attention of chosen query heads, which decide for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import pooled, with_window
from diffcache.kv.score.base import LastQueries
from diffcache.kv.settings import Count, Odd


@dataclass(frozen=True)
class HeadVote(LastQueries):
    """Average the attention of the last queries over a few query heads of the layer.

    All key-value heads get the same scores, and so keep the same tokens.

    Reference: CompressKV, arXiv 2508.02401 (window 8, pooling 5, four heads a layer).

    Args:
        heads: Numbers of the query heads of each layer that vote
            (`diffcache.kv.learn.compresskv.top_heads`); empty has all heads vote.
        size: Queries, whose own slots always stay.
        kernel: Neighboring slots whose average is taken, odd.
    """

    heads: tuple[tuple[int, ...], ...] = ()
    size: Count = 8
    kernel: Odd = 5

    def check(self) -> None:
        """Raise ValueError if a layer has no heads."""
        for layer, heads in enumerate(self.heads):
            if not heads or min(heads) < 0 or len(set(heads)) < len(heads):
                raise ValueError(f"heads[{layer}]={heads}: name at least one query head, each once, from 0")

    def __call__(self, seen: Observation) -> Tensor:
        """Return the vote, [B, H, S], infinite in the window; raise ValueError if the table is of another model."""
        width = seen.slots.width
        probs = seen.probs(self.size)[..., : max(width - self.size, 0)]
        mean = seen.window_mean(probs).flatten(1, 2)  # [B, Hq, S - w]
        if self.heads:
            if seen.layer >= len(self.heads) or max(self.heads[seen.layer]) >= mean.shape[1]:
                raise ValueError(
                    f"heads={self.heads}: layer {seen.layer} has {mean.shape[1]} query heads; find the heads of "
                    "this model with diffcache.kv.learn.compresskv.top_heads"
                )
            mean = mean[:, torch.tensor(self.heads[seen.layer], device=mean.device)]
        vote = pooled(mean.mean(1, keepdim=True), self.kernel, "avg")
        return with_window(vote, width).expand(seen.slots.k.shape[:3])

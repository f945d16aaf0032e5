"""Unusual queries of a chunk say what is read, and tokens read until they have enough mass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.blocks import Blocks, mean_keys, sizes, slots_of
from diffcache.kv.retrieval.select import Ask, Selecting, asked, fill
from diffcache.kv.retrieval.summary import Summary, probe, query_valid, stored_query
from diffcache.kv.settings import Count, SomeShare
from diffcache.kv.slots import Slots


@final
@dataclass(frozen=True)
class ProbeQuery(Selecting):
    """Choose blocks by a probe query in a chunk of a prompt, and by mass when few tokens come.

    The weight of a token is the squared distance of its query from the mean of the chunk, each
    channel in units of its variance there; the probe is the mean of the queries so weighted. When
    tokens are generated, each layer reads the fewest blocks that hold `density` of the mass of its
    block scores, never more than the budget.

    Reference: none; the formulas are ours, after the description of ActQKV, arXiv 2502.13542.

    Args:
        block: Tokens of a block.
        density: Share of the softmax mass of blocks, above 0 to 1; 1 cuts nothing off.
    """

    stored: ClassVar[bool] = True
    chunks: ClassVar[bool] = True

    block: Count = 16
    density: SomeShare = 0.95

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Add new keys to the mean of their block."""
        return Blocks(self.block).extend(old, fresh)

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the blocks that the probe, or the token, agrees with."""
        query = stored_query(ask.query, ask.layer)
        free = sizes(ask)
        single = query.count <= self.few
        if not single:
            weight = bias(query, query_valid(ask.query))
            query = probe(query, weight)
        score = over_groups(asked(query, mean_keys(ask.summary)), self.group)
        if single and self.density < 1:
            score = score.masked_fill(~self._dense(score, free), float("-inf"))
        return slots_of(fill(score, free, ask.room), ask.summary)

    def _dense(self, score: Tensor, free: Tensor) -> Tensor:
        """Return the fewest blocks that hold enough of the mass, bool [B, H, n, N]."""
        share = score.masked_fill((free <= 0)[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        best = share.sort(dim=-1, descending=True, stable=True)
        needed = best.values.cumsum(-1) - best.values < self.density
        return torch.zeros_like(needed).scatter_(-1, best.indices, needed)


def bias(query: Query, valid: Tensor) -> Tensor:
    """Return the weight of each query of a chunk, its distance over the sum of all.

    Args:
        query: n queries.
        valid: bool [B, n]; the others weigh nothing.

    Returns:
        float32 [B, Hq, n], which add up to 1; alike where all queries are.
    """
    q, there = query.q.float(), valid[:, None, :, None].float()
    count = there.sum(2, keepdim=True).clamp_min(1)
    away = (q - (q * there).sum(2, keepdim=True) / count).square() * there
    spread = away.sum(2, keepdim=True) / count
    found = (away / spread.clamp_min(1e-12)).sum(-1)
    total = found.sum(-1, keepdim=True)
    return torch.where(total > 0, found / total.clamp_min(1e-12), there[..., 0] / count[..., 0])

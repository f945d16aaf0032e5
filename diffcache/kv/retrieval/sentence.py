"""SentenceKV: sentences whose mean key a query agrees with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.blocks import Blocks, mean_keys, sizes, slots_of
from diffcache.kv.retrieval.select import Ask, Selecting, asked, fill
from diffcache.kv.retrieval.summary import Summary
from diffcache.kv.settings import Count
from diffcache.kv.slots import Slots

_ASKED = ("asked", "asked_pos")  # the last queries and their positions, of whole rows


@final
@dataclass(frozen=True)
class Sentences(Selecting):
    """Read whole sentences, those of the highest product of query and mean key.

    A query is the mean of those that were asked since its sentence began; those of the prompt and
    those before the cache was last compressed count for nothing.

    Reference: SentenceKV, arXiv 2504.00970. A token's sentence is its `tag` (see
    `sentence_tags`); tokens without one, as those that are generated, form blocks of `block`.

    Args:
        block: Tokens of a block where no sentence is known.
        longest: Tokens of a sentence at most; a longer one counts as several.
    """

    block: Count = 32
    longest: Count = 256

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Add new keys to the mean of their sentence; a prompt forgets the queries before it."""
        found = Blocks(self.block, "mean", self.longest).extend(old, fresh)
        if query.count <= self.few:
            return found
        kept = {name: value for name, value in found.state.items() if name not in _ASKED}
        return replace(found, state=kept)

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the best sentences that fit."""
        query = self._of_sentence(ask)
        score = over_groups(asked(query, mean_keys(ask.summary)), self.group)
        return slots_of(fill(score, sizes(ask), ask.room), ask.summary)

    def _of_sentence(self, ask: Ask) -> Query:
        """Return the mean of the queries since the sentence of each began, and keep them all."""
        query, summary = ask.query, ask.summary
        q, own = query.q, query.positions().expand(len(query.q), -1)
        pos = own
        if "asked" in summary.state:
            q = torch.cat([summary.state["asked"], q], 2)
            pos = torch.cat([summary.state["asked_pos"], own], 1)
        most = self.block + query.count - 1
        q, pos = q[:, :, -most:], pos[:, -most:]
        state = {**summary.state, "asked": q, "asked_pos": pos}
        ask.layer.summary = replace(summary, state=state)
        block = summary.slots["block"]
        same = block[:, :, None] == block[:, :, -query.count :, None]  # [B, 1 or H, n, S]
        far = torch.iinfo(torch.int32).max
        begin = summary.pos[:, :, None].masked_fill(~same, far).amin((1, 3))
        inside = (pos[:, None] >= begin[..., None]) & (pos[:, None] <= own[..., None])
        weight = inside / inside.sum(-1, keepdim=True).clamp_min(1)
        mean = torch.einsum("bnm,bhmd->bhnd", weight.to(q.dtype), q)
        return replace(query, q=mean)


def sentence_tags(ids: Tensor, ends: Collection[int], pad: int | None = None) -> Tensor:
    """Return the sentence of each token, from 1 on, for `cache_for(..., tags=...)`.

    Args:
        ids: int64 [B, T].
        ends: Ids of tokens that end a sentence: full stops, question marks, line ends.
        pad: Id of padding, which has no sentence and gets 0.

    Returns:
        int32 [B, T]; the end of a sentence belongs to it.

    Raises:
        ValueError: If there are no ends.
    """
    if not ends:
        raise ValueError("ends is empty: name the tokens that end a sentence")
    ends_here = torch.isin(ids, torch.tensor(sorted(ends), dtype=ids.dtype, device=ids.device))
    if pad is not None:
        ends_here &= ids != pad
    found = ends_here.cumsum(-1) - ends_here.long() + 1
    if pad is not None:
        found = found.where(ids != pad, 0)
    return found.to(torch.int32)

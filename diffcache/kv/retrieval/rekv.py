"""ReKV: frames of a film whose mean key a question agrees with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.blocks import Blocks, mean_keys, sizes, slots_of
from diffcache.kv.retrieval.gather import at_positions
from diffcache.kv.retrieval.select import Ask, Selecting, fill
from diffcache.kv.retrieval.summary import Summary, mean_query, news, stored_query
from diffcache.kv.settings import Count
from diffcache.kv.slots import Slots


@final
@dataclass(frozen=True)
class Frames(Selecting):
    """Let frames see the last tokens, and a question the frames that its mean query agrees with.

    The choice of a question is read until the next one, by all heads alike, with the last tokens
    before the question and all that follows. A chunk of at most `few` tokens is no question.

    Reference: ReKV, arXiv 2503.00540. Tokens of a frame have its number, above 0, as
    `tag`; a chunk of them sees the first tokens and the last `recent`. Of a question (tag 0) that
    comes after frames, the mean of the queries before rotation is compared with the mean of the
    keys of every block; with `space="pre"` and `positions=Slot()` what was chosen is read at rotary
    positions without gaps.

    Args:
        block: Tokens of a block without a tag.
        longest: Tokens of a frame at most; a longer one counts as several.
        similarity: Measure of query and key: `"cosine"` or `"dot"`.
    """

    stored: ClassVar[bool] = True
    chunks: ClassVar[bool] = True

    block: Count = 64
    longest: Count = 1024
    similarity: Literal["cosine", "dot"] = "cosine"

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Add new keys to the mean of their frame."""
        return Blocks(self.block, "mean", self.longest).extend(old, fresh)

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the best frames, or those that the question before chose."""
        state, count = ask.summary.state, ask.query.count
        own = news(ask.layer, ask.layer.held - count, stored=True)
        if count > 1 and bool((own.column("tag") > 0).where(own.valid, True).all()):
            return torch.zeros_like(ask.free)  # frames see the last tokens only
        if count <= self.few and "since" in state:
            later = ask.summary.pos >= state["since"]
            return at_positions(state["chosen"], ask.summary.pos) | later
        first = ask.query.start - self.recent + 1
        since = torch.full((len(own.k), 1, 1), first, device=own.k.device)
        ask.layer.summary = replace(ask.summary, state={**state, "since": since})
        one = mean_query(stored_query(ask.query, ask.layer))
        score = self._compare(one, mean_keys(ask.summary))
        return slots_of(fill(score, sizes(ask).amax(1, keepdim=True), ask.room), ask.summary)

    def _compare(self, one: Query, keys: Tensor) -> Tensor:
        """Return how all heads together agree with each block, [B, 1, 1, N]."""
        q = one.grouped(keys.shape[1])[..., 0, :].float()
        keys = keys[:, :, None].expand(-1, -1, q.shape[2], -1, -1)
        q, keys = q.flatten(1), keys.permute(0, 3, 1, 2, 4).flatten(2)
        if self.similarity == "cosine":
            q, keys = functional.normalize(q, dim=-1), functional.normalize(keys, dim=-1)
        return torch.einsum("bd,bxd->bx", q, keys)[:, None, None]

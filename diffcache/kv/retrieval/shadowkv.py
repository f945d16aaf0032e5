"""ShadowKV: keys of low rank, chunks found by their mean key, odd chunks kept exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kernels.move import gather_slots
from diffcache.kv.attend import Query
from diffcache.kv.codec.base import Exact, Payload, TensorCodec
from diffcache.kv.codec.held import KVCodec
from diffcache.kv.codec.lowrank import LowRank
from diffcache.kv.codec.tails import filled_up
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.blocks import Blocks, mean_keys, scattered, sizes, slots_of
from diffcache.kv.retrieval.select import Ask, Selecting, asked, fill
from diffcache.kv.retrieval.summary import Summary
from diffcache.kv.segment import Coded
from diffcache.kv.settings import Count, Whole
from diffcache.kv.slots import Slots, chosen


@final
@dataclass(frozen=True)
class Landmarks(Selecting):
    """Read chunks whose mean key a query attends to, and those that no mean stands for.

    Reference: ShadowKV, arXiv 2410.21465, section 4.1, algorithm 2. A chunk is worth the highest
    softmax weight that a query head of the key-value head gives its landmark. Chunks of tokens that
    are generated have landmarks too, where the paper always reads these tokens.

    Args:
        chunk: Slots of a chunk.
        outliers: Chunks with the least cosine between their mean and one of their keys, always
            read; they count towards the budget.
    """

    chunk: Count = 8
    outliers: Whole = 48

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Add new keys to the landmark of their chunk."""
        return landmarks(old, fresh, self.chunk)

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the best chunks and of the odd ones."""
        summary, size = ask.summary, sizes(ask)
        odd = outlying(summary, self.outliers)
        there = (summary.blocks["count"] > 0)[:, :, None, None]
        logits = asked(ask.query, mean_keys(summary)).masked_fill(~there, float("-inf"))
        score = logits.softmax(-1).amax(2)
        size = size.expand_as(odd)
        room = (ask.room - size.where(odd, 0).sum(-1)).clamp_min(0)
        return slots_of(fill(score, size.where(~odd, 0), room) | odd, summary)


def landmarks(old: Summary, fresh: Slots, chunk: int) -> Summary:
    """Return a summary of new slots too, with the mean key of each chunk and its least cosine with one of them."""
    found = Blocks(chunk).extend(old, fresh)
    keys, mean = fresh.k.float(), mean_keys(found)
    block = found.slots["block"][..., found.width - fresh.width :].expand(-1, keys.shape[1], -1)
    cosine = functional.cosine_similarity(keys, gather_slots(mean, block.clamp_min(0)), dim=-1)
    count = mean.shape[2]
    before = old.blocks.get("cosine", cosine[..., :0])
    least = scattered(before, block.where(block >= 0, count), cosine, count, "amin", 2.0)
    return replace(found, blocks={**found.blocks, "cosine": least})


def outlying(summary: Summary, count: int) -> Tensor:
    """Return the chunks of the least cosine, bool [B, H, N]; earlier ones first."""
    cosine = summary.blocks["cosine"]
    order = cosine.argsort(dim=-1, stable=True)[..., :count]
    found = torch.zeros_like(cosine, dtype=torch.bool).scatter_(2, order, True)
    return found & (summary.blocks["count"] > 0)


@dataclass(frozen=True, eq=False)
class Patched(Payload):
    """Coded slots, some of which are exact.

    Args:
        base: Codes of all slots [B, H, S, D].
        exact: [B, H, m, D].
        place: int32 [B, H, S], which of `exact` a slot is; -1 for its code.
    """

    base: Payload
    exact: Tensor
    place: Tensor

    def decode(self) -> Tensor:
        """Return [B, H, S, D]."""
        return self._patched(self.base.decode(), self.place)

    def decode_at(self, index: Tensor) -> Tensor:
        """Decode some slots and no others."""
        return self._patched(self.base.decode_at(index), self.place.gather(2, index))

    def _patched(self, found: Tensor, place: Tensor) -> Tensor:
        if not self.exact.shape[2]:
            return found
        exact = gather_slots(self.exact, place.long().clamp_min(0))
        return exact.where(place[..., None] >= 0, found)

    def take(self, index: Tensor) -> Patched:
        """Gather slots; what is exact stays where it is."""
        return replace(self, base=self.base.take(index), place=self.place.gather(2, index))

    def rows(self, index: Tensor) -> Patched:
        """Gather batch rows."""
        return Patched(self.base.rows(index), self.exact[index], self.place[index])


@final
@dataclass(frozen=True)
class ShadowKeys(KVCodec):
    """Hold a prompt's keys before rotation in low rank, odd chunks and the last tokens exact.

    Reference: ShadowKV, arXiv 2410.21465, section 4.1, algorithm 1. Empty slots count as zero.

    Args:
        rank: Basis vectors of the keys of all heads of a token side by side.
        chunk: Slots of a chunk.
        outliers: Chunks that stay exact.
        recent: Last tokens that stay exact.
        block: Tokens that are coded at once at least, with a basis of their own; what is generated
            stays exact until it is as many.
        values: Codec of the values; `diffcache.kv.retrieval.offload.InTiers` for host memory.
    """

    rank: Count = 160
    chunk: Count = 8
    outliers: Whole = 48
    recent: Whole = 32
    block: Count = 512
    values: TensorCodec = field(default_factory=Exact)

    def flush(self, layers: Sequence[KVLayer]) -> None:
        """Code the tail but its last tokens, if there are enough."""
        (layer,) = layers
        step = lcm(self.chunk, self.values.multiple)
        count = (layer.tail.length - self.recent) // step * step
        if count < self.block:
            return
        first = layer.tail.start
        slots = layer.tail.split(count)
        coded = self._coded(slots, layer.rotated(slots), 0)
        if first is not None:
            meta = {name: value for name, value in coded.meta.items() if name != "pos"}
            coded = replace(coded, meta=meta, start=first)
        layer.segments.append(coded)

    def hold(self, slots: Slots, level: int) -> Coded:
        """Return the slots, coded; odd chunks are told by keys as they are given."""
        slots = filled_up(slots, self.values.multiple)
        return self._coded(slots, slots, level)

    def _coded(self, slots: Slots, met: Slots, level: int) -> Coded:
        known = Summary(slots={"pos": met.pos})
        known = landmarks(known, met, self.chunk)
        mask = slots_of(outlying(known, self.outliers), known)
        index, _ = chosen(mask)
        place = (mask.cumsum(-1) - 1).where(mask, -1).to(torch.int32)
        k = slots.k.where(slots.valid[..., None], 0)
        base = LowRank(self.rank, joint=True).encode(k)
        keys = Patched(base, gather_slots(slots.k, index), place)
        meta = {name: value.clone() for name, value in slots.meta.items()}
        return Coded(keys, self.values.encode(slots.v), meta, slots.width, level=level)

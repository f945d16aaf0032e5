"""Summaries of the slots of a layer, added to as slots come, and queries that choose by them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.codec.base import Payload
from diffcache.kv.layer import KVLayer, LayerSummary
from diffcache.kv.slots import Slots, level_heads


@dataclass(frozen=True)
class Summary(LayerSummary):
    """Summary of the slots of a layer; never written to, so that forks may share it.

    Attributes:
        slots: Tensors by name, [B, 1 or H, S, ...] ordered as `KVLayer.read`, with `pos` int32.
        blocks: Tensors by name, [B, 1 or H, N, ...], of N blocks of slots.
        state: Tensors by name, [B, ...], of whole rows.
        coded: Codes of the slots, [B, H, S, r] when decoded; None where there are none.
        at: Position of the queries that `state["chosen"]` was chosen for.
        run: Slots that blocks are known of where rows have no gaps and nothing is kept by slot; 0
            where rows may have gaps.
    """

    slots: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    coded: Payload | None = None
    at: int = -1
    run: int = 0

    @property
    def width(self) -> int:
        """Slots that are known."""
        return self.slots["pos"].shape[2] if "pos" in self.slots else self.run

    @property
    def pos(self) -> Tensor:
        """Logical positions, int32 [B, 1 or H, S]; -1 where a slot is empty."""
        return self.slots["pos"]

    def slots_with(self, **columns: Tensor) -> dict[str, Tensor]:
        """Return `slots` with more at the end of each, [B, 1 or H, n, ...]."""
        found = dict(self.slots)
        for name, new in columns.items():
            old = found.get(name)
            if old is not None and old.dim() == 3:
                old, new = level_heads([old, new])
            found[name] = new if old is None else torch.cat([old, new], 2)
        return found

    def rows(self, index: Tensor) -> Summary:
        """Keep batch rows, int64 [m]."""
        slots, blocks, state = (
            {name: value.index_select(0, index) for name, value in part.items()}
            for part in (self.slots, self.blocks, self.state)
        )
        coded = None if self.coded is None else self.coded.rows(index)
        return Summary(slots, blocks, state, coded, self.at, self.run)

    def shortened(self, width: int) -> Summary | None:
        """Forget blocks that are not whole any more; None if something is kept by slot."""
        if self.slots or width >= self.run:
            return None if self.slots else self
        count = {value.shape[2] for value in self.blocks.values()} or {self.run}
        size = self.run // count.pop()
        blocks = {name: value[:, :, : width // size] for name, value in self.blocks.items()}
        return replace(self, blocks=blocks, run=width // size * size)


def known(layer: KVLayer) -> Summary:
    """Return what is known of a layer, an empty summary if that is nothing."""
    found = layer.summary
    if isinstance(found, Summary) and found.width <= layer.held:
        return found
    return Summary()


def news(layer: KVLayer, first: int, *, stored: bool) -> Slots:
    """Return the slots from `first` on, as `KVLayer.read` orders them, keys as stored or as queries meet them."""
    tail = layer.tail.read()
    before = layer.held - layer.tail.length
    if tail is not None and first >= before:
        slots = tail.narrow(first - before, tail.width) if first > before else tail
    else:
        slots = layer.read()
        slots = slots.narrow(first, slots.width)
    return slots if stored else layer.rotated(slots)


def stored_query(query: Query, layer: KVLayer) -> Query:
    """Return queries before rotation, if the layer's keys are held so; as they are otherwise.

    Their own keys are the last that were written, which says at which rotary positions they are.
    """
    if layer.rotary is None:
        return query
    rpos = news(layer, layer.held - query.count, stored=True).rpos[:, :1]
    at = layer.query_places(rpos, query.q.shape[1])
    return replace(query, q=layer.rotary.unrotate(query.q, at))


def query_valid(query: Query) -> Tensor:
    """Return which queries are of tokens, not of padding, bool [B, n]."""
    batch = len(query.q)
    if query.mask is None:
        return torch.ones(batch, query.count, dtype=torch.bool, device=query.q.device)
    at = query.positions().expand(batch, -1).clamp_max(query.mask.shape[-1] - 1)
    mask = query.mask[:, 0].expand(batch, -1, -1)
    return mask.gather(2, at[..., None])[..., 0]


def mean_query(query: Query) -> Query:
    """Return the mean of queries, padding left out, as one of float32."""
    valid = query_valid(query)
    return probe(query, (valid / valid.sum(-1, keepdim=True).clamp_min(1))[:, None])


def probe(query: Query, weight: Tensor) -> Query:
    """Return one query, the sum of n by weights [B, Hq or 1, n], which add up to 1."""
    q = (query.q.float() * weight[..., None]).sum(2, keepdim=True)
    return replace(query, q=q, pos=None, mask=None, start=query.start + query.count - 1)

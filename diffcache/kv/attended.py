"""Attention of the queries of one forward to the slots of a layer, looked at block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from diffcache.kernels.attention import attn_forward, attn_mass, takes
from diffcache.kv.attend import Query, is_open, limits, probabilities, softmax, visible
from diffcache.kv.slots import Slots
from diffcache.kv.view import View

# Bytes of the logits that are held at once: those of a CPU stay in the cache of its core.
_CPU_BYTES, _DEVICE_BYTES = 1 << 22, 1 << 27
_LEAST, _MOST = 16, 256  # queries of a block
# Logits [B, h, G, n, S'] of the first S' slots, and which key-value heads and queries they are of.
Change = Callable[[Tensor, range, range], Tensor]


@dataclass(frozen=True)
class Attended:
    """Queries of one forward, and the slots they attended to.

    Attributes:
        query: The queries.
        view: View of all slots, the queries' own among them.
        valid: bool [B, n]; False are queries of padding, which count for nothing.
        padding: Tokens of each row that are none, int64 [B]; None where there are none.
        lse: Log-sum-exps of the queries, float32 [B, Hq, n], where the forward had them.
    """

    query: Query
    view: View
    valid: Tensor | None = None
    padding: Tensor | None = None
    lse: Tensor | None = None

    @cached_property
    def slots(self) -> Slots:
        """All slots, keys rotated."""
        return self.view.slots

    def blocks(self) -> Iterator[tuple[Query, Tensor, Tensor]]:
        """Yield blocks of queries, their logits and probabilities [B, H, G, n, S], zero for queries of padding."""
        first = self.query.start
        batch, heads = self.query.q.shape[:2]
        _, count = self._sizes(batch * heads * self.slots.width, 1)
        block = min(max(count, 1), _MOST)
        for part, found, probs in probabilities(self.query, self.slots, block):
            if self.valid is not None:
                rows = self.valid[:, part.start - first :][:, : part.count, None]
                probs = probs * rows[:, None, None]
            yield part, found, probs

    def sums(self, change: Change | None = None) -> Tensor:
        """Return the attention that every slot got, summed over queries.

        Keys that no query of a block can see are left out of its product, and no more logits are
        held at once than stay in a cache.

        Args:
            change: Function of the logits before the softmax, called with logits [B, h, G, n, S'],
                key-value heads and queries, both as ranges; None leaves the logits as they are.

        Returns:
            float32 [B, H, S], the mean over the query heads of a key-value head.
        """
        query, slots = self.query, self.slots
        is_plain = change is None and query.softcap is None and "logn" not in slots.meta  # logits are products
        if is_plain and takes(query.q, slots.k, None):
            return self._streamed()
        batch, heads, width = query.q.shape[0], *slots.k.shape[1:3]
        dtype = torch.promote_types(query.q.dtype, torch.float32)
        q = query.grouped(heads)
        groups = q.shape[2]
        wide, count = self._sizes(batch * groups * width, heads)
        if wide == heads and count == q.shape[3]:  # a token that is generated, most of all
            part = range(count)
            total = self._block(q, slots.k.to(dtype), range(heads), part, change)
            return total.to(torch.float32) / groups
        total = torch.zeros(batch, heads, width, dtype=dtype, device=q.device)
        for first in range(0, heads, wide):
            some = range(first, min(first + wide, heads))
            k = slots.k[:, some.start : some.stop].to(dtype)
            asked = q[:, some.start : some.stop]
            for start in range(0, query.count, count):
                part = range(start, min(start + count, query.count))
                upto = self._reach(part)
                here = asked[:, :, :, part.start : part.stop]
                got = self._block(here, k[:, :, :upto], some, part, change)
                total[:, some.start : some.stop, :upto] += got
        return total.to(torch.float32) / groups

    def _streamed(self) -> Tensor:
        """Return what `sums` returns, of kernels that hold no logits in memory."""
        q, k, scale = self.query.q, self.slots.k, self.query.scale
        seen, lse = limits(self.query, self.view), self.lse
        if lse is None:
            lse = attn_forward(q, k, None, scale, **seen)[1]
        if self.query.sinks is not None:
            lse = torch.logaddexp(lse, self.query.sinks.to(lse.dtype)[:, None])
        if self.valid is not None:
            lse = lse.masked_fill(~self.valid[:, None], torch.inf)
        return attn_mass(q, k, lse, scale, **seen) * (k.shape[1] / q.shape[1])

    def _block(self, q: Tensor, k: Tensor, heads: range, part: range, change: Change | None) -> Tensor:
        """Return the attention that slots got from some queries, summed over them and their groups, [B, h, S'].

        Args:
            q: [B, h, G, n, D], of queries `part` and key-value heads `heads`.
            k: [B, h, S', D], in the dtype of the result.
            heads: Key-value heads.
            part: Queries.
            change: See `sums`.
        """
        groups, softcap, meta = q.shape[2], self.query.softcap, self.slots.meta
        found = (q.to(k.dtype) * self.query.scale).flatten(2, 3) @ k.mT
        found = found.unflatten(2, (groups, len(part)))
        if softcap is not None:
            found = softcap * (found / softcap).tanh()
        if "logn" in meta:
            many = meta["logn"]
            many = many[:, heads.start : heads.stop] if many.shape[1] > 1 else many
            found = found + many[:, :, None, None, : found.shape[-1]].to(found.dtype)
        if change is not None:
            found = change(found, heads, part)
        sinks = self.query.sinks
        sinks = None if sinks is None else sinks[heads.start * groups : heads.stop * groups]
        probs = softmax(self._hidden(found, heads, part), sinks)
        if not self.sees_all and not self._is_causal:
            probs = probs.nan_to_num_(0.0)  # a query that sees nothing
        probs = probs.flatten(2, 3)
        if self.valid is not None:
            weights = self.valid[:, None, None, part.start : part.stop].to(probs.dtype).repeat(1, 1, 1, groups)
        elif probs.shape[2] >= _LEAST:
            weights = probs.new_ones(1, 1, 1, probs.shape[2])
        else:
            return probs.sum(2)
        return (weights @ probs)[:, :, 0]

    def counts(self) -> Tensor:
        """Return how many queries could see each slot, float32 [B, 1 or H, S]."""
        if self.sees_all and self.valid is None:
            shape = self.slots.pos.shape
            return torch.full(shape, self.query.count, dtype=torch.float32, device=self.query.q.device)
        batch, width = self.query.q.shape[0], self.slots.width
        _, count = self._sizes(batch * width * self.slots.pos.shape[1], 1)
        total = torch.zeros_like(self.slots.pos, dtype=torch.float32)
        for start in range(0, self.query.count, count):
            stop = min(start + count, self.query.count)
            seen = visible(self.query.narrow(start, stop), self.slots.pos)
            if self.valid is not None:
                seen = seen & self.valid[:, None, start:stop, None]
            total = total + seen.sum(2)
        return total

    @cached_property
    def sees_all(self) -> bool:
        """Return whether every query is known to see every slot."""
        return is_open(self.query, self.view)

    @cached_property
    def _is_causal(self) -> bool:
        """Return whether queries see the slots up to their own, in the order of positions."""
        query = self.query
        plain = query.mask is None and query.window is None and query.pos is None
        return plain and query.causal and self.view.start is not None

    def _sizes(self, a_query: int, heads: int) -> tuple[int, int]:
        """Return how many heads and queries are looked at together.

        Args:
            a_query: Logits of a query and key-value head, over all rows and groups.
            heads: Key-value heads.
        """
        most = _CPU_BYTES if self.query.q.device.type == "cpu" else _DEVICE_BYTES
        room = most // 4 // max(a_query, 1)
        count = min(max(room, _LEAST), self.query.q.shape[2])
        return min(max(room // count, 1), heads), count

    def _reach(self, part: range) -> int:
        """Return how many of the first slots these queries may see."""
        if self.sees_all or not self._is_causal:
            return self.slots.width
        assert self.view.start is not None
        return min(self.query.start + part.stop - self.view.start, self.slots.width)

    def _hidden(self, found: Tensor, heads: range, part: range) -> Tensor:
        """Return logits, -inf where a query does not see a slot."""
        if self.sees_all:
            return found
        if self._is_causal:
            assert self.view.start is not None
            own = self.query.start + part.start - self.view.start  # the slot of the first query
            last = found[..., own:]
            later = torch.ones(last.shape[-2:], dtype=torch.bool, device=found.device).triu(1)
            last.masked_fill_(later, float("-inf"))
            return found
        pos = self.slots.pos
        pos = pos[:, heads.start : heads.stop] if pos.shape[1] > 1 else pos
        seen = visible(self.query.narrow(part.start, part.stop), pos)
        return found.masked_fill_(~seen[:, :, None], float("-inf"))

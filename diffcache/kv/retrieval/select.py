"""Choose slots for few queries and gather no others, as all retrievers do."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from diffcache.errors import CacheWarning
from diffcache.kv.attend import Groups, Query, visible
from diffcache.kv.budget import count_for, slots_for
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.gapless import Pick, Run, is_gapless, views_at
from diffcache.kv.retrieval.gather import positions_of, views_of
from diffcache.kv.retrieval.summary import Summary, known, mean_query, news
from diffcache.kv.retrieve import Retriever
from diffcache.kv.settings import Count, Size, Whole
from diffcache.kv.slots import Slots
from diffcache.kv.view import View

_OLDEST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Ask:
    """Slots that queries choose from, and how many of them.

    Attributes:
        query: The queries.
        layer: Layer that the queries read.
        others: All layers.
        summary: Summary of the layer's slots, the newest included.
        free: Slots that may be chosen, bool [B, 1 or H, S]; the others are empty, hidden, or read anyway.
        room: Number of slots to choose, int64 [B, 1 or H].
    """

    query: Query
    layer: KVLayer
    others: list[KVLayer]
    summary: Summary
    free: Tensor
    room: Tensor


@dataclass(frozen=True)
class Selecting(Retriever):
    """Read the first and last tokens, and of the others what a query asks for.

    A prompt reads everything. Of a few queries at once, as when drafted tokens are verified, each
    chooses, and all read what any of them chose. Queries that are `together`, such as those of a
    chunk of video, read what their mean chooses. Summaries are added to as tokens come.

    Args:
        budget: Slots a query reads, the first and last ones among them; or a share of the tokens.
            Of several queries at once, those between the first and the last are not counted.
        sinks: First tokens that are always read.
        recent: Last tokens that are always read.
        few: Most queries of a forward that choose; more are a prompt.
        group: Reduction over the query heads of a key-value head: `"mean"`, `"max"` or `"sum"`.
        skip: First layers that read everything.
    """

    stored: ClassVar[bool] = False  # summaries are of keys as stored, not as queries meet them
    chunks: ClassVar[bool] = False  # a chunk of a prompt chooses from what was there before it

    budget: Size = 1024
    sinks: Whole = 4
    recent: Count = 64
    few: Count = 8
    group: Groups = "max"
    skip: Whole = 0

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return what the queries attend to."""
        if layer.index < self.skip:
            return layer.views()
        together = query.together and query.count > 1
        one_or_all = query.count > self.few and not together
        if query.count == 1:  # without a mask or window it sees all slots
            one_or_all = query.mask is None and query.window is None
        if self.whole and one_or_all and is_gapless(layer):
            return self._of_run(query, layer, others)
        summary = known(layer)
        if summary.run:  # it says nothing of single slots
            summary = Summary()
        if summary.width < layer.held:
            fresh = news(layer, summary.width, stored=self.stored)
            summary = replace(summary, slots=summary.slots_with(pos=fresh.pos))
            summary = self.extend(summary, fresh, query, layer)
        layer.summary = summary
        chunk = together or (self.chunks and query.start > 0)
        if query.count > self.few and not chunk:
            return layer.views()
        valid = _seen(query, summary.pos)  # no room for what a window or mask hides
        always = self._always(summary.pos, query.count) & valid
        tokens = valid.sum(-1)
        own = always.sum(-1) - query.count + 1  # the budget is of the last of several queries
        room = (slots_for(self.budget, tokens) - own).clamp_min(0)
        self._tell_of_room(layer.held)
        one = query
        if together and not self.chunks:
            one = replace(mean_query(query), start=query.start)
            one = replace(one, q=one.q.to(query.q.dtype))
        ask = Ask(one, layer, others, summary, valid & ~always, room)
        chosen = self.choose(ask)
        if chosen is None:
            return layer.views()
        mask = always | (chosen & ask.free)
        summary = known(layer)
        picked = positions_of(chosen & ask.free, summary.pos)
        state = {**summary.state, "chosen": picked}
        layer.summary = replace(summary, state=state, at=query.start)
        if bool((mask == valid).all()):
            return layer.views()
        return views_of(layer, mask)

    @property
    def whole(self) -> int:
        """Slots that rows without gaps are summed up by; 0 where they are as all others.

        Those that are not enough yet must be among the last ones, which are always read.
        """
        return 0

    def extend_whole(self, old: Summary, fresh: Slots) -> Summary:
        """Return a summary that knows more whole blocks of rows without gaps."""
        return old

    def pick(self, run: Run) -> Pick | None:
        """Return what one query chooses in rows without gaps; None for all."""
        raise NotImplementedError

    def _of_run(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return what queries attend to in rows without gaps; nothing is read from the device."""
        summary, held = known(layer), layer.held
        if not summary.run:
            summary = Summary()
        count = (held - summary.run) // self.whole * self.whole
        if count:
            fresh = news(layer, summary.run, stored=self.stored).narrow(0, count)
            summary = replace(self.extend_whole(summary, fresh), run=summary.run + count)
        layer.summary = summary
        first = min(self.sinks, held)
        last = max(held - self.recent, first)
        room = max(count_for(self.budget, held) - first - (held - last), 0)
        if query.count == 1:
            self._tell_of_room(held)
        if query.count > 1 or room >= last - first:
            return layer.views()
        pick = self.pick(Run(query, layer, others, summary, first, last, room))
        if pick is None:
            return layer.views()
        state = {**summary.state, "chosen": pick.positions()}
        layer.summary = replace(summary, state=state, at=query.start)
        return views_at(layer, pick, first, last)

    @abstractmethod
    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Return a summary that knows new slots too.

        Args:
            old: Summary whose `pos` has them already.
            fresh: The new slots, keys as they are stored or as queries meet them.
            query: The queries that came with them.
            layer: The layer.
        """

    @abstractmethod
    def choose(self, ask: Ask) -> Tensor | None:
        """Return the slots that any of the queries reads, bool [B, 1 or H, S]; None for all."""

    def _always(self, pos: Tensor, count: int) -> Tensor:
        """Return the first and last slots of each row, the last of the first of the queries."""
        first = pos.where(pos >= 0, _OLDEST).amin(-1, keepdim=True)
        newest = pos.amax(-1, keepdim=True)
        return (pos < first + self.sinks) | (pos > newest - self.recent - count + 1)

    def _tell_of_room(self, held: int) -> None:
        """Warn where a share of so few slots leaves none to choose; a number is checked before."""
        always = self.sinks + self.recent
        if not isinstance(self.budget, float) or not always < held < (always + 1) / self.budget:
            return
        warnings.warn(
            f"budget={self.budget}: of fewer than {ceil((always + 1) / self.budget)} tokens that "
            f"is no more than the {always} that are always read (sinks={self.sinks}, "
            f"recent={self.recent}), and nothing else is; give more, or make those fewer",
            CacheWarning,
            stacklevel=2,
        )


def _seen(query: Query, pos: Tensor) -> Tensor:
    """Return which slots at positions [B, 1 or H, S] any of the queries sees, bool like them."""
    count = query.count
    window = None if query.window is None else query.window + count - 1
    mask = None if query.mask is None else query.mask.any(2, keepdim=True)
    return visible(replace(query.narrow(count - 1, count), mask=mask, window=window), pos)[:, :, 0]


def asked(query: Query, keys: Tensor) -> Tensor:
    """Return the products of queries with vectors that stand for keys.

    Args:
        query: The queries.
        keys: [B, H, X, D].

    Returns:
        float32 [B, H, G, n, X], times the query's scale.
    """
    q = query.grouped(keys.shape[1]).float()
    return torch.einsum("bhgnd,bhxd->bhgnx", q, keys.float()) * query.scale


def top(score: Tensor, free: Tensor, room: Tensor) -> Tensor:
    """Return the slots of the highest scores; of equals the later one first.

    Args:
        score: [B, H, n, S] of n queries.
        free: bool [B, 1 or H, S], which may be chosen.
        room: int64 [B, 1 or H], how many.

    Returns:
        Slots that any of the queries chooses, bool [B, H, S].
    """
    score = score.masked_fill(~free[:, :, None], float("-inf"))
    count = room[..., None, None].clamp_max(score.shape[3]).expand(*score.shape[:3], 1)
    most = int(count.max()) if count.numel() else 0
    if most <= 0:
        return torch.zeros_like(score[:, :, 0], dtype=torch.bool)
    best = score.topk(most, sorted=True).values
    least = best.gather(-1, (count - 1).clamp_min(0))
    return (latest(score, least, count) & (count > 0)).any(2) & free


def latest(score: Tensor, least: Tensor, count: Tensor | int) -> Tensor:
    """Return the slots of the highest scores; of equals the later one first.

    Args:
        score: Score of each slot, [..., S].
        least: Lowest of the scores to return, [..., 1].
        count: Number of slots to return.

    Returns:
        bool like `score`.
    """
    above, tied = score > least, score == least
    left = count - above.sum(-1, keepdim=True)
    late = tied.flip(-1).cumsum(-1).flip(-1)
    return above | (tied & (late <= left))


def fill(score: Tensor, size: Tensor, room: Tensor) -> Tensor:
    """Return the blocks of the highest scores that fit; the best one always; earlier ones first.

    Args:
        score: [B, H, n, N] of n queries.
        size: int64 [B, 1 or H, N], slots of each block; blocks of none are not chosen.
        room: int64 [B, 1 or H], slots.

    Returns:
        Blocks that any of the queries chooses, bool [B, H, N].
    """
    score = score.masked_fill((size <= 0)[:, :, None], float("-inf"))
    order = score.argsort(dim=-1, descending=True, stable=True)
    own = size[:, :, None].expand_as(order).gather(-1, order)
    space = room[..., None, None]
    fits = own.cumsum(-1) <= space
    fits[..., :1] |= space > 0
    fits &= score.gather(-1, order) > float("-inf")
    return torch.zeros_like(fits).scatter_(-1, order, fits).any(2)

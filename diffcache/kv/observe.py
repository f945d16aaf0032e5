"""Observations of a layer by scorers: its slots in order of position, and the last queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffcache.kv.attend import Query, logits, softmax
from diffcache.kv.attended import Attended
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary import Rotation
from diffcache.kv.slots import Slots, writable
from diffcache.kv.view import View

if TYPE_CHECKING:
    from diffcache.kv.score.base import Score


@dataclass
class Observation:
    """One layer as scorers, planners and mergers see it.

    Slots stand in order of position and end together: empty ones come first, so the last r slots
    are the r most recent ones in every row.

    Attributes:
        layer: The layer's number, from 0.
        layers: Number of layers.
        slots: All slots, decoded, keys rotated to their own positions.
        stats: Statistics of scorers, by name, float32 [B, H, S].
        tokens: Tokens that each row has seen, int64 [B, H], without padding.
        queries: The last queries [B, Hq, w, D] with their positions [B, w], -1 for those of
            padding; None where the recipe keeps none.
        out: The weight of the layer's output projection, [hidden, Hq * Dv], where it is known.
        order: int64 [B, 1 or H, S], where each slot is in the order of `KVLayer.read`; None for
            the same order.
        levels: int8 [B, 1 or H, S], the rung of the ladder that holds each slot, 0 for none; None
            where all are 0.
        rotary: Rotation of the keys, where they are held before it; None elsewhere.
        below: Bound above all positions, where no slot is empty; None where it is not known.
    """

    layer: int
    layers: int
    slots: Slots
    stats: dict[str, Tensor]
    tokens: Tensor
    queries: Query | None = None
    out: Tensor | None = None
    order: Tensor | None = None
    levels: Tensor | None = None
    rotary: Rotation | None = None
    below: int | None = None

    @property
    def valid(self) -> Tensor:
        """Slots that hold a token, bool [B, 1 or H, S]."""
        return self.slots.valid

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens held in each row, int64 [B, H]."""
        return self.valid.sum(-1).expand(self.slots.k.shape[:2])

    @cached_property
    def pad(self) -> Tensor:
        """Empty slots at the start of each row, int64 [B, H]."""
        return self.slots.width - self.lengths

    @cached_property
    def asked(self) -> Query:
        """The last queries; raise ValueError if none are kept."""
        if self.queries is None:
            raise ValueError(
                "this scorer looks at the last queries, and none were kept: its `window` must be "
                "at least 1, and the cache must be used through attention"
            )
        return self.queries

    @cached_property
    def query_valid(self) -> Tensor:
        """Mask of the last queries that are of tokens, bool [B, w]."""
        return self.asked.positions() >= 0

    def last(self, count: int) -> Query:
        """Return the last `count` queries, or as many as there are."""
        return self.asked.narrow(max(self.asked.count - count, 0), self.asked.count)

    def probs(self, count: int) -> Tensor:
        """Return how the last `count` queries attend, [B, H, G, w, S] float32, zero for padding."""
        asked = self.last(count)
        found = softmax(logits(asked, self.slots).float(), asked.sinks).nan_to_num(0.0)
        return found * (asked.positions() >= 0)[:, None, None, :, None]

    def mass(self, count: int) -> Tensor:
        """Return the attention that slots got from the last queries, or as many as there are, [B, H, S] float32.

        It is summed over the queries, those of padding left out, and the mean over query heads.
        """
        asked = self.last(count)
        known = self.below is not None and asked.pos is None
        valid = None if known else asked.positions() >= 0
        return Attended(asked, View(self.slots, below=self.below), valid).sums()

    def window_mean(self, per_query: Tensor) -> Tensor:
        """Average [B, H, G, w, ...] over the queries that are of tokens."""
        valid = self.query_valid[:, -per_query.shape[3] :]
        weight = valid / valid.sum(-1, keepdim=True).clamp_min(1)
        shape = (len(valid), 1, 1, valid.shape[1], *[1] * (per_query.dim() - 4))
        return (per_query * weight.to(per_query.dtype).view(shape)).sum(3)


def observe(layer: KVLayer, layers: int, queries: Query | None = None, out: Tensor | None = None) -> Observation:
    """Return what scorers see of a layer."""
    slots, order = layer.read(), None
    if layer.segments or layer.tail.start is None:
        order = torch.argsort(slots.pos, dim=-1, stable=True)
        slots = slots.gather(order)
    if layer.latent:
        slots = layer.rotated(slots)
    if layer.rotary is not None:
        if layer.positions is not None and not layer.positions.anchored:
            # The queries are where the map puts them, so the keys have to be as well.
            slots = replace(slots, meta={**slots.meta, "rpos": layer.placed(slots.meta)})
        slots = replace(slots, k=layer.rotary.rotate(slots.k, slots.rpos))
    stats = layer.stats
    if order is not None:
        stats = {name: value.gather(2, order.expand(-1, value.shape[1], -1)) for name, value in stats.items()}
    tokens = torch.full((len(slots.k), 1), layer.seen, device=slots.k.device)
    if layer.padding is not None:
        tokens = tokens - layer.padding[:, None]
    tokens = tokens.expand(-1, slots.k.shape[1])
    levels = None
    if order is not None and any(segment.level for segment in layer.segments):
        column = torch.zeros(order.shape[-1], dtype=torch.int8, device=order.device)
        first = 0
        for segment in layer.segments:
            column[first : first + segment.width] = segment.level
            first += segment.width
        levels = column[order]
    seen = stats, tokens, queries, out, order, levels
    return Observation(layer.index, layers, slots, *seen, layer.rotary)


@dataclass
class Pending:
    """Queries whose tokens may be taken back, not yet observed."""

    query: Query
    valid: Tensor | None


class Ring:
    """The last queries of a layer, and those after them that may be taken back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pending: list[Pending] = []
        self.query: Query | None = None
        self.cleared = 0  # tokens before that all was forgotten

    def push(self, query: Query, valid: Tensor | None) -> None:
        """Add queries at the end, `valid` [B, n] being False for padding, and forget the oldest."""
        new = query.narrow(max(query.count - self.size, 0), query.count)
        pos = new.positions().expand(len(new.q), -1)
        if valid is not None:
            pos = pos.where(valid[:, -new.count :], -1)
        new = replace(new, pos=pos, mask=None)
        if self.query is not None:
            old = self.query.narrow(max(self.query.count + new.count - self.size, 0), self.query.count)
            new = replace(new, q=torch.cat([old.q, new.q], 2), pos=torch.cat([old.positions(), pos], 1))
        elif new.count < query.count:
            new = replace(new, q=new.q.clone())
        self.query = new

    def rollback(self, count: int) -> None:
        """Forget the last queries."""
        if self.pending:
            shorten(self.pending, count)
        elif self.query is not None:
            self.query = self.query.narrow(0, max(self.query.count - count, 0))

    def misses(self, count: int, left: int) -> bool:
        """Return whether queries are gone that are last once `count` others, after `left` tokens, are forgotten."""
        had = 0 if self.query is None else self.query.count
        return max(had - count, 0) < min(self.size, left - self.cleared)

    def rows(self, index: Tensor) -> None:
        """Keep batch rows, int64 [m]."""
        if self.query is not None:
            pos = self.query.positions().index_select(0, index)
            self.query = replace(self.query, q=self.query.q.index_select(0, index), pos=pos)

    def fork(self) -> Ring:
        """Return a ring with the same content."""
        other = Ring(self.size)
        other.query, other.cleared = self.query, self.cleared
        return other

    def reset(self, seen: int = 0) -> None:
        """Forget all queries; `seen` tokens were there before the next one."""
        self.query, self.cleared = None, seen
        self.pending.clear()

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        found = [each.query.q for each in self.pending]
        return found if self.query is None else [*found, self.query.q, self.query.positions()]

    def kept(self) -> Query | None:
        """Return the last `size` queries."""
        if self.query is None or not self.query.count:
            return None
        return self.query.narrow(max(self.query.count - self.size, 0), self.query.count)


def shorten(pending: list[Pending], count: int) -> None:
    """Forget the last queries."""
    while count and pending:
        last = pending[-1]
        left = last.query.count - count
        if left > 0:
            valid = None if last.valid is None else last.valid[:, :left]
            pending[-1] = Pending(last.query.narrow(0, left), valid)
            return
        count -= last.query.count
        pending.pop()


def lengthen(layer: KVLayer, names: Sequence[str]) -> None:
    """Have statistics of all slots of a layer, 0 where nothing was noted."""
    form = layer.form
    if form is None:
        return
    shape = (form.batch, form.heads, layer.held)
    for name in names:
        old = layer.stats.get(name)
        if old is not None and old.shape == shape:
            layer.stats[name] = writable(old)
            continue
        new = torch.zeros(shape, dtype=torch.float32, device=form.device)
        if old is not None:
            new[..., : old.shape[2]] = old
        layer.stats[name] = new


def note(
    score: Score,
    layer: KVLayer,
    query: Query,
    valid: Tensor | None,
    view: View | None = None,
    lse: Tensor | None = None,
) -> None:
    """Have a score take note, in the statistics of a layer, of what queries asked of its slots.

    Args:
        score: The score; one without statistics takes no note.
        layer: The layer, which has the queries' own keys.
        query: The queries.
        valid: bool [B, n]; False are queries of padding.
        view: View of all slots that the queries attended to, where there is one.
        lse: Log-sum-exps of the queries over these, where they are known.
    """
    names = score.statistics
    if not names:
        return
    if view is None:
        view = View(layer.met(), layer.first, below=layer.below)
    slots = view.slots
    lengthen(layer, names)
    if score.attends:
        score.note(layer.stats, Attended(query, view, valid, layer.padding, lse))
        return
    start = slots.width - (layer.seen - query.start)
    stop = start + query.count
    stats = {name: layer.stats[name][..., start:stop] for name in names}
    score.enter(stats, query, slots.narrow(start, stop), layer.index)

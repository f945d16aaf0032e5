"""One query's choice in rows without gaps: the number of a slot says all, so there are no masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.gather import met_slots
from diffcache.kv.retrieval.summary import Summary
from diffcache.kv.segment import PLAIN, Coded, Segment
from diffcache.kv.slots import EMPTY, Slots
from diffcache.kv.view import ListedView, View


@dataclass(frozen=True)
class Run:
    """Slots that one query chooses from: 0 to `held` of every row, each at its own position.

    Attributes:
        query: The query.
        layer: Layer that the query reads.
        others: All layers.
        summary: Summary of the layer's slots.
        first: First slot that may be chosen; those before are read anyway.
        last: Slot after the last that may be chosen; it and those behind it are read anyway.
        room: Number of slots to choose, fewer than there are.
    """

    query: Query
    layer: KVLayer
    others: list[KVLayer]
    summary: Summary
    first: int
    last: int
    room: int


@dataclass(frozen=True)
class Pick:
    """Chosen slots, int64 [B, H, n], and whether each is no filler, bool like it; None where none is."""

    index: Tensor
    keep: Tensor | None = None

    def positions(self) -> Tensor:
        """Return the positions of the slots, int32 [B, H, n], -1 where filled up."""
        pos = self.index.to(torch.int32)
        return pos if self.keep is None else pos.where(self.keep, EMPTY)


def is_gapless(layer: KVLayer) -> bool:
    """Return whether every row holds all positions from 0 on, and nothing else is said of slots."""
    reached = 0
    if layer.positions is not None:  # keys are rotated by what else is held
        return False
    for segment in layer.segments:
        plain = segment.traits == PLAIN and isinstance(segment, Coded) and not segment.meta
        if not plain or segment.first != reached:
            return False
        reached += segment.width
    tail = layer.tail
    if not tail.length:
        return bool(reached)
    return tail.start == reached and len(tail.tensors()) == 2  # keys and values


def nothing(run: Run) -> Pick:
    """Return a choice of no slot."""
    assert run.layer.form is not None
    return Pick(run.query.q.new_zeros(len(run.query.q), run.layer.form.heads, 0, dtype=torch.int64))


def views_at(layer: KVLayer, pick: Pick, first: int, last: int) -> list[View]:
    """Return chosen slots, and all before `first` and from `last` on, as queries meet them."""
    rows, device = pick.index.shape[:2], pick.index.device
    ends = [range(first), range(last, layer.held)]
    early, late = (torch.arange(end.start, end.stop, device=device).expand(*rows, -1) for end in ends)
    index = torch.cat([early, pick.index, late] if first else [pick.index, late], -1)
    keep = pick.keep
    if keep is not None:
        keep = functional.pad(keep, (first, layer.held - last), value=True)
    below, whole = layer.seen if keep is None else None, met_slots(layer)
    if whole is not None:
        return [View(ListedView(whole, index, keep, layer.seen), below=below)]
    k, v = _read_at(layer, index)
    slots = Slots(k, v, {"pos": Pick(index, keep).positions()})
    return [View(layer.rotated(slots), below=below)]


def _read_at(layer: KVLayer, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values at some slots, int64 [B, H, n], each part asked for all of them."""
    tail = layer.tail.read()
    parts: list[Segment | Slots] = [*layer.segments]
    if tail is not None and tail.width:
        parts.append(tail)
    found: tuple[Tensor, Tensor] | None = None
    begin = 0
    for part in parts:
        at = (index - begin).clamp(0, part.width - 1) if len(parts) > 1 else index
        slots = part.gather(at) if isinstance(part, Slots) else part.read_at(at)
        if found is None:
            found = slots.k, slots.v
        else:
            here = (index >= begin)[..., None]
            found = slots.k.where(here, found[0]), slots.v.where(here, found[1])
        begin += part.width
    assert found is not None
    return found


def best_blocks(score: Tensor, size: int, run: Run) -> Pick:
    """Return the slots of the blocks of the highest scores that fit, as `select.fill` does.

    Args:
        score: [B, H, 1, N] of whole blocks.
        size: Slots of a block.
        run: Slots to choose from, and how many.
    """
    if not run.room:
        return nothing(run)
    # Blocks that no slot may be chosen of are left out: one at either end may be of fewer slots.
    begin, end = run.first // size, -(-run.last // size)
    own = torch.full((end - begin,), size, device=score.device)
    own[-1] -= end * size - run.last
    own[0] -= run.first - begin * size
    score = score[:, :, 0, begin:end]
    # No more can fit than these, as but two have fewer slots.
    order = score.argsort(dim=-1, descending=True, stable=True)[..., : run.room // size + 2]
    fits = own.index_select(0, order.flatten()).view_as(order).cumsum(-1) <= run.room
    fits[..., 0] = True
    inside = torch.arange(begin * size, begin * size + size, device=score.device)
    index = order[..., None] * size + inside
    keep = fits[..., None] & (index < run.last)
    if run.first % size:
        keep &= index >= run.first
    return Pick(index.flatten(2), keep.flatten(2))

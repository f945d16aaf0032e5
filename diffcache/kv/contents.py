"""Contents of a layer, which are segments and a tail: read them together, and keep some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.attend import View
from diffcache.kv.segment import Segment, Unread, leveled, read_all
from diffcache.kv.slots import EMPTY, Slots, chosen, join_meta
from diffcache.kv.tail import Tail

# Turns keys [B, H, S, D] to positions [B, 1 or H, S], given their metadata.
Turn = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


def stored(segments: Sequence[Segment], tail: Tail) -> Slots | None:
    """Return all slots, segments first, keys as they are stored; None if nothing was written."""
    last = tail.read()
    if segments and last is not None and not last.width:
        last = None
    return read_all(segments, last) if segments else last


def unread(segments: Sequence[Segment], tail: Tail) -> Unread | None:
    """Return what `stored` returns, to be decoded when it is asked for; None if nothing is coded.

    Args:
        segments: Settled slots.
        tail: Exact slots after them.
    """
    if not any(segment.coded for segment in segments):
        return None
    last = tail.read()
    return Unread(tuple(segments), last if last is not None and last.width else None)


def metadata(segments: Sequence[Segment], tail: Tail) -> dict[str, Tensor] | None:
    """Return the metadata of what `stored` returns; nothing is decoded."""
    parts = [segment.metadata() for segment in segments]
    last = tail.read()
    if last is not None and (last.width or not parts):
        parts.append(last.meta)
    if len(parts) < 2:
        return parts[0] if parts else None
    return join_meta(parts)


def parts_of(segments: Sequence[Segment], tail: Tail, seen: int) -> list[View]:
    """Return a view of each part, keys as they are stored.

    Args:
        segments: Settled slots.
        tail: Exact slots after them.
        seen: Position after the newest; all positions are below it.
    """
    found = []
    for segment in segments:
        below = seen if segment.whole else None
        found.append(View(segment.read(), segment.first, segment.traits, below))
    slots = tail.read()
    if slots is not None and (slots.width or not found):
        start = tail.start if tail.is_plain else None
        found.append(View(slots, start, below=seen if tail.whole else None))
    return found


def placed_parts(
    views: Sequence[View],
    places: Tensor,
    turn: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor],
) -> list[View]:
    """Return views with their keys turned under numbers that depend on all of them.

    Args:
        views: Parts, keys as they are stored.
        places: Positions of all slots, int64 [B, 1 or H, S].
        turn: Turns keys to positions, given their metadata.
    """
    first, found = 0, []
    for view in views:
        slots = view.slots
        at = places[:, :, first : first + slots.width]
        first += slots.width
        k, v = slots.k, slots.v
        if len(k) < len(at):  # shared by rows that need not hold the same
            k, v = (x.expand(len(at), -1, -1, -1) for x in (k, v))
        found.append(replace(view, source=Slots(turn(k, at, slots.meta), v, slots.meta)))
    return found


def first_of(segments: Sequence[Segment], tail: Tail) -> int | None:
    """Return the first position, where all follow one another and slots are one token each."""
    runs = [(segment.first, segment.width) for segment in segments]
    if tail.length or not runs:
        runs.append((tail.start if tail.is_plain else None, tail.length))
    reached = runs[0][0]
    for first, width in runs:
        if first is None or first != reached:
            return None
        reached = first + width
    return runs[0][0]


@dataclass(frozen=True)
class Kept:
    """Slots that are kept of segments and a tail.

    Attributes:
        segments: Kept slots of each segment that has any, their codes as they were.
        exact: Kept slots of the tail without `last`; None where there is no tail.
        last: Newest slots, which stay at the end of the tail; None where there is no tail.
        origin: Place of each slot in the order of `stored`, int64 [B, H, n], -1 where it is empty.
    """

    segments: list[Segment]
    exact: Slots | None
    last: Slots | None
    origin: Tensor


def kept(segments: Sequence[Segment], tail: Tail, mask: Tensor, last: int) -> Kept:
    """Return the slots that are kept of segments and a tail.

    Args:
        segments: Settled slots.
        tail: Exact slots after them.
        mask: True for slots that are kept, bool [B, H, S], in the order of `stored`.
        last: Newest slots that are kept in any case.
    """
    found, origins, first = [], [], 0
    for segment in segments:
        index, there = chosen(mask[..., first : first + segment.width])
        if index.shape[2]:
            found.append(leveled(segment.take(index, there)))
            origins.append((index + first).where(there, EMPTY))
        first += segment.width
    slots, exact, own = tail.read(), None, None
    if slots is not None:
        stop = slots.width - last
        index, there = chosen(mask[..., first : first + stop])
        origins.append((index + first).where(there, EMPTY))
        exact, own = slots.gather(index, there), slots.narrow(stop, slots.width).clone()
        newest = torch.arange(first + stop, first + slots.width, device=mask.device)
        origins.append(newest.expand(*mask.shape[:2], -1))
    return Kept(found, exact, own, torch.cat(origins, -1))

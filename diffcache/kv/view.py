"""The one read path: slots of a layer as queries meet them, in one view or in several parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diffcache.kv.mover import Mover
from diffcache.kv.positions import PositionMap, Slot, key_places, own_places, placed
from diffcache.kv.rotary import Rotation
from diffcache.kv.segment import PLAIN, Segment, Traits, read_all
from diffcache.kv.slots import Slots, join_meta
from diffcache.kv.tail import Tail

_SHARE = 8  # room for one in so many slots, when more are read than before


@dataclass(frozen=True)
class Unread:
    """Slots that are decoded when they are asked for: segments, and exact slots after them.

    Attributes:
        segments: First slots; at least one segment.
        tail: Last slots, None for none.
    """

    segments: tuple[Segment, ...]
    tail: Slots | None

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        own = 0 if self.tail is None else self.tail.width
        return sum(segment.width for segment in self.segments) + own

    def read(self) -> Slots:
        """Return the slots, decoded."""
        return read_all(self.segments, self.tail)


@dataclass(frozen=True)
class Listed:
    """Chosen slots, which are gathered when they are asked for.

    Attributes:
        slots: What they are chosen from, keys as queries meet them.
        index: int64 [B, 1 or H, n], slots of each row, none of which is empty.
        keep: bool like `index`, False where it is filled up; None where it is not.
        below: What the positions of all chosen slots are below.
    """

    slots: Slots
    index: Tensor
    keep: Tensor | None
    below: int

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        return self.index.shape[2]

    def read(self) -> Slots:
        """Return the slots; those that fill up come out empty."""
        return self.slots.gather(self.index, self.keep)

    def places(self) -> Tensor:
        """Return the slots by number, -1 where rows are filled up."""
        return self.index if self.keep is None else self.index.where(self.keep, -1)


@dataclass(frozen=True)
class View:
    """Slots as queries meet them, keys rotated.

    Attributes:
        source: Slots that are attended to; codes are decoded, and chosen slots gathered, when
            `slots` is first asked for.
        start: The first position where no slot is empty, every slot stands for one token and
            positions follow one another in every row; None otherwise.
        traits: Temperature and merging of the logits of these slots.
        below: Bound above all positions, where no slot is empty; None where it is not known.
    """

    source: Slots | Unread | Listed
    start: int | None = None
    traits: Traits = PLAIN
    below: int | None = None

    @cached_property
    def slots(self) -> Slots:
        """Slots that are attended to, decoded or gathered."""
        return self.source if isinstance(self.source, Slots) else self.source.read()

    @property
    def width(self) -> int:
        """Slots a row, empty ones included."""
        return self.source.width


class KVView:
    """Slots of a layer, settled segments and a growing tail, as they are read.

    `diffcache.kv.layer.KVLayer` is one that is written to as well, and documents the attributes.
    """

    def __init__(
        self,
        index: int,
        rotary: Rotation | None,
        positions: PositionMap | None,
        mover: Mover | None,
        read_once: bool,
    ) -> None:
        if positions is not None and rotary is None and mover is None:
            raise ValueError(
                f"positions={positions!r}: keys are rotated when they are read, which takes a "
                "rotary"
            )
        if mover is not None and (rotary is not None or positions != Slot()):
            raise ValueError("mover: goes with positions=Slot() and keys that come rotated")
        self.index = index
        self.rotary = rotary
        self.positions = positions
        self.mover = mover
        self.seen = 0
        self.segments: list[Segment] = []
        self.tail = Tail()
        self.latent = False
        self.read_once = read_once
        self._reads = Reads()

    # as stored -----------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Slots of the longest row, empty ones included."""
        count = self.tail.length
        for segment in self.segments:
            count += segment.width
        return count

    def read(self) -> Slots:
        """Return all slots, segments first; keys as they are stored.

        Raises:
            ValueError: If nothing was written.
        """
        slots = self.tail.read()
        if self.segments:
            return read_all(self.segments, slots if slots is not None and slots.width else None)
        if slots is None:
            raise ValueError(f"layer {self.index} is empty: write keys and values first")
        return slots

    def meta(self) -> dict[str, Tensor]:
        """Return the metadata of all slots, as `read` orders them; nothing is decoded.

        Raises:
            ValueError: If nothing was written.
        """
        if not self.segments:
            return self.read().meta
        parts = [segment.metadata() for segment in self.segments]
        last = self.tail.read()
        if last is not None and last.width:
            parts.append(last.meta)
        return parts[0] if len(parts) == 1 else join_meta(parts)

    @property
    def first(self) -> int | None:
        """The first position, where all follow one another and slots are one token each."""
        runs = [(segment.first, segment.width) for segment in self.segments]
        if self.tail.length or not runs:
            runs.append((self.tail.start if self.tail.is_plain else None, self.tail.length))
        reached = runs[0][0]
        for first, width in runs:
            if first is None or first != reached:
                return None
            reached = first + width
        return runs[0][0]

    @property
    def below(self) -> int | None:
        """Bound above all positions, where no slot is known to be empty."""
        whole = self.tail.whole
        for segment in self.segments:
            whole = whole and segment.whole
        return self.seen if whole else None

    # as queries meet them ------------------------------------------------------------------

    def views(self) -> list[View]:
        """Return what queries attend to: keys rotated, segments of their own kind apart."""
        turned = self.rotary or self.mover or self.latent
        if not self.segments and not turned:  # exact slots as they are, the common case
            slots = self.read()
            start = None if "logn" in slots.meta else self.tail.start
            return [View(slots, start, below=self.seen if self.tail.whole else None)]
        if not self._is_plain():
            return self._parts()
        source: Slots | Unread | None = None
        if not turned and not self.read_once and any(segment.coded for segment in self.segments):
            last = self.tail.read()
            source = Unread(tuple(self.segments), last if last is not None and last.width else None)
        return [View(source or self.met(), self.first, below=self.below)]

    @contextmanager
    def meeting(self) -> Iterator[list[View]]:
        """Give `views` for one attention; the few keys that a mover moves take no copy of all."""
        count = None
        if self.mover is not None and not self.segments:
            count = self.mover.lead(self.tail, self.seen)
        if self.mover is None or count is None:
            yield self.views()
            return
        gap = self.seen - self.tail.length
        with self.mover.moved(self.tail, count, gap):
            yield self._stored_parts()

    def met(self) -> Slots:
        """Return all slots as queries meet them; as far as they were kept, they are not read again.

        Raises:
            ValueError: If nothing was written.
        """
        fresh = self.rotary is not None or bool(self.segments)  # else it is the tail's own memory
        if self.read_once and fresh and self.held and self._is_plain() and not self.latent:
            return self._reads.read(self)
        return self.rotated(self.read())

    def rotated(self, slots: Slots) -> Slots:
        """Return slots with their keys as queries meet them."""
        if self.latent:
            return Slots(torch.cat([slots.k, slots.v], -1), slots.k, slots.meta)
        if self.rotary is None and self.mover is None:
            return slots
        k = self._turned(slots.k, self.placed(slots.meta), slots.meta)
        return Slots(k, slots.v, slots.meta)

    def rotate(self, q: Tensor, pos: Tensor) -> Tensor:
        """Return queries as keys at the same positions are rotated, given what is held now.

        Args:
            q: [B, Hq, n, D], before rotation.
            pos: int [n] or [B, n], positions as they are counted by `seen`, or as `rpos` has them.

        Raises:
            ValueError: If the layer has no rotary, or nothing was written.
        """
        if self.rotary is None:
            raise ValueError("rotate: this layer has no rotary; its keys come rotated")
        at = (pos if pos.dim() == 2 else pos[None])[:, None]
        return self.rotary.rotate(q, self.query_places(at, q.shape[1]))

    def query_places(self, at: Tensor, heads: int) -> Tensor:
        """Return the positions that queries are rotated under, given what is held now.

        Args:
            at: int [B or 1, 1, n], their own positions.
            heads: Query heads.
        """
        if self.positions is None:
            return at
        assert self.rotary is not None
        at = placed(self.positions, at, own_places(self.meta()), self.rotary.unit)
        return at if at.shape[1] == 1 else at.repeat_interleave(heads // at.shape[1], 1)

    def placed(self, meta: Mapping[str, Tensor]) -> Tensor:
        """Return the positions that keys of these slots are rotated under."""
        rotation = self.rotary if self.mover is None else self.mover.rotation
        assert rotation is not None
        return key_places(self.positions, meta, rotation)

    # within --------------------------------------------------------------------------------

    def _is_plain(self) -> bool:
        """Return whether all slots are attended to alike."""
        return all(segment.traits == PLAIN for segment in self.segments)

    def _turned(self, k: Tensor, at: Tensor, meta: Mapping[str, Tensor]) -> Tensor:
        """Return keys as they are met at positions, int [B, 1 or H, S]."""
        if self.mover is not None:
            return self.mover.turned(k, at, meta)
        return k if self.rotary is None else self.rotary.rotate(k, at)

    def _stored_parts(self) -> list[View]:
        """Return a view of each segment and of the tail, keys as they are stored."""
        found = []
        for segment in self.segments:
            below = self.seen if segment.whole else None
            found.append(View(segment.read(), segment.first, segment.traits, below))
        slots, tail = self.tail.read(), self.tail
        if slots is not None and (slots.width or not found):
            start = tail.start if tail.is_plain else None
            found.append(View(slots, start, below=self.seen if tail.whole else None))
        return found

    def _parts(self) -> list[View]:
        """Return a view of each segment and of the tail, as queries meet them."""
        parts = self._stored_parts()
        if self.positions is None:
            return [replace(view, source=self.rotated(view.slots)) for view in parts]
        places = self.placed(self.meta())  # numbers that depend on all parts
        first, found = 0, []
        for view in parts:
            slots = view.slots
            at = places[:, :, first : first + slots.width]
            first += slots.width
            k, v = slots.k, slots.v
            if len(k) < len(at):  # shared by rows that need not hold the same
                k, v = (x.expand(len(at), -1, -1, -1) for x in (k, v))
            turned = Slots(self._turned(k, at, slots.meta), v, slots.meta)
            found.append(replace(view, source=turned))
        return found


class Reads:
    """Rotated keys and decoded values of a layer, kept from one read to the next.

    Slots that were overwritten are read again, and new ones. A segment never changes; where
    segments or the tail are others than before, or keys are rotated otherwise, all are read. What
    is returned is valid until the next read.
    """

    def __init__(self) -> None:
        self._slots: Slots | None = None
        self._places: Tensor | None = None  # positions that keys are rotated under
        self._buffers: dict[str, Tensor] = {}
        self._source: list[object] = []  # what was read, compared by identity
        self._moves = -1  # of the tail, when it was read

    def read(self, layer: KVView) -> Slots:
        """Return all slots of a layer, which holds at least one, as queries meet them."""
        tail, rotary, positions = layer.tail, layer.rotary, layer.positions
        settled, held = layer.held - tail.length, layer.held
        source: list[object] = [*layer.segments, tail, rotary, positions]
        known = self._slots is not None and len(source) == len(self._source)
        known = known and all(a is b for a, b in zip(source, self._source, strict=False))
        still = known and self._moves == tail.moves  # only overwritten, if at all
        if not still or self._slots is None or "ver" in self._slots.meta:
            meta = layer.meta()
            self._places = None if rotary is None else key_places(positions, meta, rotary)
        else:
            meta = self._slots.meta
        steady = positions is None or positions.steady
        first = settled + min(tail.clean, tail.length) if known and (still or steady) else 0
        if first < held:
            self._refill(layer, first)
        self._source, self._moves, tail.clean = source, tail.moves, tail.length
        values = self._buffers.get("v")
        if values is None:
            last = tail.read()
            assert last is not None
            values = last.v
        self._slots = Slots(self._buffers["k"][:, :, :held], values[:, :, :held], meta)
        return self._slots

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is kept."""
        found = list(self._buffers.values())
        if self._places is not None:
            found.append(self._places)
        return found if self._slots is None else [*found, *self._slots.meta.values()]

    def _refill(self, layer: KVView, first: int) -> None:
        """Read the slots from one on, which is the first of all or one of the tail."""
        slots = layer.tail.read() if first else layer.read()
        assert slots is not None
        if first and len(slots.k) != len(self._buffers["k"]):  # of a segment shared by all rows
            self._refill(layer, 0)
            return
        if first:
            settled = layer.held - layer.tail.length
            slots = slots.narrow(first - settled, slots.width)
        k = slots.k
        if layer.rotary is not None:
            assert self._places is not None
            k = layer.rotary.rotate(k, self._places[:, :, first:])
        if not first:  # none of it may be memory of the tail, which is written to elsewhere
            self._buffers = {"k": k.clone() if k is slots.k else k}
            if layer.segments:
                self._buffers["v"] = slots.v
            return
        self._buffers["k"] = _put(self._buffers["k"], k, first)
        if layer.segments:
            self._buffers["v"] = _put(self._buffers["v"], slots.v, first)


def _put(buffer: Tensor, fresh: Tensor, first: int) -> Tensor:
    """Return a buffer with slots from `first` on, the others being as they were."""
    stop = first + fresh.shape[2]
    if buffer.shape[2] < stop:
        larger = buffer.new_empty(*buffer.shape[:2], stop + stop // _SHARE, buffer.shape[3])
        larger[:, :, :first] = buffer[:, :, :first]
        buffer = larger
    buffer[:, :, first:stop] = fresh
    return buffer

"""Reading: rotated keys and decoded values of a layer, kept from one read to the next."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diffcache.kv.contents import metadata, stored
from diffcache.kv.positions import PositionMap, key_places
from diffcache.kv.rotary import Rotation
from diffcache.kv.segment import Segment
from diffcache.kv.slots import Slots
from diffcache.kv.tail import Tail

_SHARE = 8  # room for one in so many slots, when more are read than before


class Reading:
    """All slots of a layer as queries meet them; only what changed is read again.

    Slots that were overwritten are read again, and new ones. A segment never changes; where
    segments or the tail are others than before, or keys are rotated otherwise, all are read. What
    is returned is valid until the next read.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was read."""
        self._slots: Slots | None = None
        self._places: Tensor | None = None  # positions that keys are rotated under
        self._buffers: dict[str, Tensor] = {}
        self._source: list[object] = []  # what was read, compared by identity
        self._moves = -1  # of the tail, when it was read

    def read(
        self,
        segments: Sequence[Segment],
        tail: Tail,
        rotary: Rotation | None,
        positions: PositionMap | None,
    ) -> Slots:
        """Return all slots as queries meet them.

        Args:
            segments: Settled slots.
            tail: Exact slots after them; at least one slot is held.
            rotary: Rotation of the keys as they are read; None where they come rotated.
            positions: Numbers that they are rotated under; None: their own.
        """
        settled = sum(segment.width for segment in segments)
        held = settled + tail.length
        source: list[object] = [*segments, tail, rotary, positions]
        known = self._slots is not None and len(source) == len(self._source)
        known = known and all(a is b for a, b in zip(source, self._source, strict=False))
        still = known and self._moves == tail.moves  # only overwritten, if at all
        if not still or self._slots is None or "ver" in self._slots.meta:
            meta = metadata(segments, tail)
            assert meta is not None
            self._places = None if rotary is None else key_places(positions, meta, rotary)
        else:
            meta = self._slots.meta
        steady = positions is None or positions.steady
        first = settled + min(tail.clean, tail.length) if known and (still or steady) else 0
        if first < held:
            self._refill(segments, tail, rotary, first)
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

    def _refill(
        self, segments: Sequence[Segment], tail: Tail, rotary: Rotation | None, first: int
    ) -> None:
        """Read the slots from one on, which is the first of all or one of the tail."""
        settled = sum(segment.width for segment in segments)
        slots = tail.read() if first else stored(segments, tail)
        assert slots is not None
        if first and len(slots.k) != len(self._buffers["k"]):  # of a segment shared by all rows
            self._refill(segments, tail, rotary, 0)
            return
        if first:
            slots = slots.narrow(first - settled, slots.width)
        k = slots.k
        if rotary is not None:
            assert self._places is not None
            k = rotary.rotate(k, self._places[:, :, first:])
        if not first:  # none of it may be memory of the tail, which is written to elsewhere
            self._buffers = {"k": k.clone() if k is slots.k else k}
            if segments:
                self._buffers["v"] = slots.v
            return
        self._buffers["k"] = _put(self._buffers["k"], k, first)
        if segments:
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

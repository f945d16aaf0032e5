"""The tail of a layer: exact slots that grow at their end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kernels.move import kv_scatter, write_slots
from diffcache.kv.slots import SlotIndex, Slots, fill_of, filled, outside, span

# Slots that are made room for when the tail is full: an eighth of those there are, within bounds.
# With 64 the others are copied at every 64th token, a little of what attention reads meanwhile.
_LEAST, _SHARE, _MOST = 16, 8, 64


@dataclass(frozen=True)
class Refill:
    """Moves of the last slots; a slot that goes itself stays put and is cut off.

    Attributes:
        source: int64 [B, 1 or H, n], slots that are read, the last of their rows.
        target: int64 [B, 1 or H, n], slots that are written, each once.
    """

    source: Tensor
    target: Tensor

    @classmethod
    def of(cls, index: Tensor, width: int) -> Refill:
        """Return what fills the places of slots that go.

        Args:
            index: int64 [B, 1 or H, n], different slots of each row.
            width: Slots of a row; the last n are free afterwards.
        """
        count = index.shape[2]
        last = torch.arange(width - count, width, device=index.device)
        if count == 1:
            return cls(last.expand_as(index), index)
        # Of the last slots those that stay move, in order, into the places before them; as many
        # places as slots are left, which are those of the last slots that go, in the same order.
        target = index.sort(-1).values
        goes = (target[..., None, :] == last[:, None]).any(-1)
        order = torch.argsort(goes.to(torch.int8), dim=-1, stable=True)
        return cls(last.expand_as(index).gather(-1, order), target)

    def apply(self, tensor: Tensor) -> Tensor:
        """Move what is known of slots, [B, H, S, ...], or 1 for H if heads drop the same, in place; return it."""
        source, target = self.source, self.target
        for _ in tensor.shape[3:]:
            source, target = source.unsqueeze(-1), target.unsqueeze(-1)
        wide = (-1, tensor.shape[1], -1, *tensor.shape[3:])
        moved = tensor.gather(2, source.expand(wide))
        return tensor.scatter_(2, target.expand(wide), moved)


class Tail:
    """Exact slots in buffers with room at the end, so that a token costs no copy of the others.

    Positions are kept only where they do not follow one another.

    Attributes:
        length: Slots a row.
        start: Position of the first slot, while positions follow one another.
        whole: True if no slot is empty; False where that is not known.
        clean: Leading slots that were not overwritten since this was set.
        moves: Number of times that slots came or went.
    """

    def __init__(self, start: int = 0) -> None:
        self.length = 0
        self.start: int | None = start
        self.whole = True
        self.clean = self.moves = 0
        self._buffers: dict[str, Tensor] = {}
        self._lent = False  # a fork sees the same buffers
        self._settled = 0

    @classmethod
    def of(cls, slots: Slots) -> Tail:
        """Return a tail that holds a copy of these slots, which are settled."""
        tail = cls()
        tail.append(slots)
        tail._settled = tail.length
        return tail

    def append(self, slots: Slots) -> None:
        """Add slots at the end; their `pos` decides whether positions are kept."""
        first, whole = None, False
        if self.start is not None or not self._buffers:  # else the device would be read for little
            first, whole = _facts(slots)
        self._add(slots, first, whole)

    def _add(self, slots: Slots, first: int | None, whole: bool) -> None:
        """Add slots, the first position given if these follow one another, and whether none is known to be empty."""
        if slots.width:
            self._lay_out(slots, first)
            self.whole = self.whole and whole
        elif not self._buffers:
            self._lay_out(slots, self.start)
        self.moves += 1
        self._make_room(slots.width)
        stop = self.length + slots.width
        for name, buffer in self._buffers.items():
            buffer[:, :, self.length : stop] = getattr(slots, name) if name in ("k", "v") else slots.column(name)
        self.length = stop

    def extend(self, k: Tensor, v: Tensor, start: int, meta: Mapping[str, Tensor] | None = None) -> None:
        """Add tokens [B, H, n, D] at positions from `start` on, the common case."""
        count, follows = k.shape[2], start
        if self.start is not None:
            follows = self.start + self.length
        if meta or not self._buffers or follows != start:
            pos = span(start, start + count, len(k), k.device)
            self._add(Slots(k, v, {"pos": pos, **(meta or {})}), start, True)
            return
        self.moves += 1
        self._make_room(count)
        for name, buffer in self._buffers.items():
            place = buffer.narrow(2, self.length, count)
            if name == "k":
                place.copy_(k)
            elif name == "v":
                place.copy_(v)
            elif name in ("pos", "rpos"):
                place.copy_(torch.arange(start, start + count, device=k.device))
            else:
                place.fill_(fill_of(name)[1])
        self.length += count

    def read(self) -> Slots | None:
        """Return views of all slots, or None where nothing was ever written."""
        held = self._buffers
        if not held:
            return None
        k, v, length = held["k"], held["v"], self.length
        has_room, meta = k.shape[2] > length, {}
        for name in held:
            if name not in ("k", "v"):
                meta[name] = held[name].narrow(2, 0, length) if has_room else held[name]
        if self.start is not None:
            pos = torch.arange(self.start, self.start + length, dtype=torch.int32, device=k.device)
            meta["pos"] = pos.expand(k.shape[0], 1, -1)
        if has_room:
            k, v = k.narrow(2, 0, length), v.narrow(2, 0, length)
        return Slots(k, v, meta)

    def overwrite(self, index: Tensor | range | SlotIndex, columns: dict[str, Tensor], before: int = 0) -> None:
        """Write into slots that are there, named and refused as `KVLayer.overwrite` says.

        Args:
            index: Slots, counted from `before`, the number of the first.
            columns: Tensors by name, `k` and `v` [B, H, n, D] and metadata [B, 1, n].
            before: Slots of the layer that come first.
        """
        index, least = self._checked(index, columns["k"].shape[2], before)
        self._own()
        self.clean = min(self.clean, least)
        if isinstance(index, range):
            for name, value in columns.items():
                self._buffers[name].narrow(2, index.start, len(index)).copy_(value)
            return
        if index.dim() == 2 and (len(index) == 1 or index.stride(0) == 0):
            index = index[0]  # one row that is shared by all
        held, fresh = {}, {}
        for name, value in columns.items():
            buffer = self._buffers[name]
            if buffer.shape[2] > self.length:  # so that no index reaches beyond
                buffer = buffer[:, :, : self.length]
            value = value.to(buffer.dtype)
            if value.shape[:2] != buffer.shape[:2] or name == "ver":  # one value for all
                value = value.expand(*buffer.shape[:2], index.shape[-1], *buffer.shape[3:])
            held[name], fresh[name] = buffer, value
        kv_scatter(held.pop("k"), held.pop("v"), fresh["k"], fresh["v"], index)
        if held:
            write_slots(index, *((buffer, fresh[name]) for name, buffer in held.items()))

    def _checked(self, index: Tensor | range | SlotIndex, count: int, before: int) -> tuple[Tensor | range, int]:
        """Return slots counted from 0, and the first that may be among them."""
        stop = before + self.length
        if isinstance(index, Tensor):
            index = SlotIndex.of(index, stop, before)
        if isinstance(index, range) and (index.step != 1 or len(index) != count):
            raise ValueError(f"index={index!r} of {count} tokens: a range must have step 1 and as many slots")
        if count and not before <= index.start < index.stop <= stop:
            raise ValueError(outside(index.start, index.stop - 1, before, stop))
        least = index.start - before if count else self.length
        if isinstance(index, range):
            return range(index.start - before, index.stop - before), least
        return (index.index - before if before else index.index), least

    def keys(self, count: int) -> Tensor:
        """Return the first keys [B, H, n, D], to be written to."""
        self._own()
        return self._buffers["k"].narrow(2, 0, count)

    def refill(self, refill: Refill) -> None:
        """Drop slots by putting the last ones in their places; what is left is settled."""
        self._own()
        heads = refill.target.shape[1]
        if self.start is not None:
            room = self._buffers["k"].shape[2]
            pos = span(self.start, self.start + room, len(refill.target), refill.target.device)
            self._buffers["pos"], self.start = pos.clone(), None
        for name, buffer in self._buffers.items():
            if buffer.shape[1] < heads:
                buffer = self._buffers[name] = buffer.expand(-1, heads, -1).clone()
            refill.apply(buffer)
        self.length -= refill.target.shape[2]
        self._settled, self.clean = self.length, 0
        self.moves += 1

    @property
    def loose(self) -> int:
        """Slots at the end that are the last tokens, so that they can be taken back."""
        return self.length if self.start is not None else self.length - self._settled

    def empty(self, count: int) -> Tensor | int:
        """Return how many of the last slots of each row are empty, int64 [B], 0 for none."""
        if self.start is not None or not count:
            return 0
        return (self._buffers["pos"][:, 0, self.length - count : self.length] < 0).sum(-1)

    def drop_last(self, count: int) -> None:
        """Forget the last slots."""
        self.length -= count
        self.clean, self.moves = min(self.clean, self.length), self.moves + 1

    def split(self, count: int) -> Slots:
        """Take out the first slots and return them, as views of memory the tail leaves."""
        slots = self.read()
        assert slots is not None
        rest = slots.narrow(count, self.length).clone()
        start = None if self.start is None else self.start + count
        self.length, self._buffers, self._lent = 0, {}, False
        self.start, self.whole, self.clean = start, True, 0
        self._settled = max(self._settled - count, 0)
        if start is None:
            self.append(rest)
        else:
            rest.meta.pop("pos")
            self.extend(rest.k, rest.v, start, rest.meta)
        return slots.narrow(0, count)

    def map(self, select: Tensor) -> None:
        """Keep batch rows, int64 [m]."""
        self._buffers = {name: value.index_select(0, select) for name, value in self._buffers.items()}
        self._lent, self.clean = False, 0
        self.moves += 1

    def fork(self) -> Tail:
        """Return a tail with the same slots; whichever writes first makes a copy."""
        other = Tail()
        other.__dict__.update(self.__dict__)
        other._buffers = dict(self._buffers)
        self._lent = other._lent = True
        return other

    @property
    def is_plain(self) -> bool:
        """Return whether positions follow one another and every slot stands for one token."""
        return self.start is not None and "logn" not in self._buffers

    def tensors(self) -> list[Tensor]:
        """Return the buffers."""
        return list(self._buffers.values())

    # memory --------------------------------------------------------------------------------

    def _lay_out(self, slots: Slots, follows: int | None) -> None:
        """Have a buffer for all that the slots bring."""
        before = self.read()
        wanted = {"k": slots.k, "v": slots.v, **slots.meta}
        if before is None:
            self.start = follows
            if follows is not None:
                wanted.pop("pos")
            self._buffers = {name: value[:, :, :0] for name, value in wanted.items()}
            return
        if self.start is not None and follows != self.start + self.length:
            self._buffers["pos"] = before.pos.clone()
            self.start = None
        for name in wanted.keys() - self._buffers.keys() - {"pos"}:
            self._buffers[name] = filled(name, before.pos).clone()
        for name, buffer in self._buffers.items():
            heads = wanted[name].shape[1] if name in wanted else 1
            if heads > buffer.shape[1]:
                self._buffers[name] = buffer.expand(-1, heads, *buffer.shape[2:]).clone()

    def _make_room(self, count: int) -> None:
        need, fits = self.length + count, True
        for buffer in self._buffers.values():
            fits = fits and buffer.shape[2] >= need
        if fits:
            self._own()
            return
        # What comes first, a prompt or what is kept of one, takes no more than it needs.
        capacity = need + (min(max(_LEAST, need // _SHARE), _MOST) if self.length else 0)
        for name, buffer in self._buffers.items():
            larger = buffer.new_empty(*buffer.shape[:2], capacity, *buffer.shape[3:])
            larger[:, :, : self.length] = buffer[:, :, : self.length]
            self._buffers[name] = larger
        self._lent = False

    def _own(self) -> None:
        """Have buffers that no fork sees and that torch lets be written to."""
        shared = self._lent
        if not shared and not torch.is_inference_mode_enabled():
            for buffer in self._buffers.values():
                shared = shared or buffer.is_inference()
        if shared:
            self._buffers = {name: value.clone() for name, value in self._buffers.items()}
            self._lent = False


def _facts(slots: Slots) -> tuple[int | None, bool]:
    """Return the first position if positions follow one another, and whether no slot is empty."""
    pos = slots.pos
    if not pos.numel():
        return None, True
    first = pos.flatten()[0]
    run = first + torch.arange(slots.width, device=pos.device)
    facts = [first, (pos == run).all(), (pos >= 0).all()]
    place, follows, whole = torch.stack([fact.long() for fact in facts]).tolist()  # one wait
    return (place if follows and whole else None), bool(whole)

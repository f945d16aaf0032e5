"""The tail of a layer: exact slots that grow at their end."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kv.slots import Slots, filled, span

_LEAST = 16  # slots that are made room for when the tail is full
_SHARE = 8  # or one in so many of those there are


class Tail:
    """Exact slots in buffers with room at the end, so that a token costs no copy of the others.

    Positions are kept only where they do not follow one another.

    Attributes:
        length: slots a row.
        start: the position of the first slot, while positions follow one another.
    """

    def __init__(self, start: int = 0) -> None:
        self.length = 0
        self.start: int | None = start
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
        self._lay_out(slots)
        self._make_room(slots.width)
        stop = self.length + slots.width
        for name, buffer in self._buffers.items():
            buffer[:, :, self.length : stop] = self._column(name, slots)
        self.length = stop

    def extend(self, k: Tensor, v: Tensor, start: int) -> None:
        """Add tokens [B, H, n, D] at positions from `start` on, the common case."""
        count = k.shape[2]
        if self.start is None or len(self._buffers) > 2 or self.start + self.length != start:
            self.append(Slots(k, v, {"pos": span(start, start + count, len(k), k.device)}))
            return
        if not self._buffers:
            self._buffers = {"k": k[:, :, :0], "v": v[:, :, :0]}
        self._make_room(count)
        self._buffers["k"].narrow(2, self.length, count).copy_(k)
        self._buffers["v"].narrow(2, self.length, count).copy_(v)
        self.length += count

    def read(self) -> Slots | None:
        """Return views of all slots, or None where nothing was ever written."""
        if not self._buffers:
            return None
        meta = {name: value[:, :, : self.length] for name, value in self._buffers.items()}
        k, v = meta.pop("k"), meta.pop("v")
        if self.start is not None:
            meta["pos"] = span(self.start, self.start + self.length, k.shape[0], k.device)
        return Slots(k, v, meta)

    def overwrite(self, index: Tensor, columns: dict[str, Tensor]) -> None:
        """Write into slots that are there.

        Args:
            index: int64 [n] or [B, n], slots of every row.
            columns: by name, `k` and `v` [B, H, n, D] and metadata [B, 1, n].
        """
        self._own()
        shared = index.view(-1) if index.dim() == 1 or len(index) == 1 else None
        batch = torch.arange(len(index), device=index.device)[:, None] if shared is None else None
        for name, value in columns.items():
            buffer = self._buffers[name]
            if buffer.shape[2] > self.length:  # so that no index reaches beyond
                buffer = buffer[:, :, : self.length]
            fresh = value.to(buffer.dtype)
            if fresh.shape[:2] != buffer.shape[:2] or name == "ver":  # one value for all
                fresh = fresh.expand(*buffer.shape[:2], index.shape[-1], *buffer.shape[3:])
            # Both copy whole vectors; `scatter_` would look up every channel, ten times slower.
            if shared is not None:
                buffer.index_copy_(2, shared, fresh)
            else:
                buffer.transpose(1, 2)[batch, index] = fresh.transpose(1, 2)

    @property
    def loose(self) -> int:
        """Slots at the end that are the last tokens, so that they can be taken back."""
        return self.length if self.start is not None else self.length - self._settled

    def drop_last(self, count: int) -> None:
        """Forget the last slots."""
        self.length -= count

    def split(self, count: int) -> Slots:
        """Take out the first slots and return them, as views of memory the tail leaves."""
        slots = self.read()
        assert slots is not None
        rest = slots.narrow(count, self.length).clone()
        start = None if self.start is None else self.start + count
        self.length, self._buffers, self._lent = 0, {}, False
        self.start, self._settled = start, max(self._settled - count, 0)
        if start is None or len(rest.meta) > 1:
            self.append(rest)
        else:
            self.extend(rest.k, rest.v, start)
        return slots.narrow(0, count)

    def map(self, select: Tensor) -> None:
        """Keep batch rows, int64 [m]."""
        self._buffers = {
            name: value.index_select(0, select) for name, value in self._buffers.items()
        }
        self._lent = False

    def fork(self) -> Tail:
        """Return a tail with the same slots; whichever writes first makes a copy."""
        other = Tail()
        other.__dict__.update(self.__dict__)
        other._buffers = dict(self._buffers)
        self._lent = other._lent = True
        return other

    @property
    def is_plain(self) -> bool:
        """Whether positions follow one another and every slot stands for one token."""
        return self.start is not None and "logn" not in self._buffers

    def tensors(self) -> list[Tensor]:
        """Return the buffers."""
        return list(self._buffers.values())

    # memory --------------------------------------------------------------------------------

    def _lay_out(self, slots: Slots) -> None:
        """Have a buffer for all that the slots bring."""
        follows = self._follows(slots)
        before = self.read()
        wanted = {"k": slots.k, "v": slots.v, **slots.meta}
        if before is None:
            if follows is not None:
                self.start = follows
                wanted.pop("pos")
            else:
                self.start = None
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

    def _follows(self, slots: Slots) -> int | None:
        """Return the first position if the positions follow one another in every row."""
        if self._buffers and self.start is None:
            return None
        pos = slots.pos
        if not slots.width:
            return self.start
        first = int(pos.flatten()[0])
        run = span(first, first + slots.width, 1, pos.device)
        return first if first >= 0 and bool((pos == run).all()) else None

    def _column(self, name: str, slots: Slots) -> Tensor:
        if name in ("k", "v"):
            return slots.k if name == "k" else slots.v
        return slots.meta[name] if name in slots.meta else filled(name, slots.pos)

    def _make_room(self, count: int) -> None:
        need = self.length + count
        if all(buffer.shape[2] >= need for buffer in self._buffers.values()):
            self._own()
            return
        # What comes first, a prompt or what is kept of one, takes no more than it needs.
        capacity = need + (max(_LEAST, need // _SHARE) if self.length else 0)
        for name, buffer in self._buffers.items():
            larger = buffer.new_empty(*buffer.shape[:2], capacity, *buffer.shape[3:])
            larger[:, :, : self.length] = buffer[:, :, : self.length]
            self._buffers[name] = larger
        self._lent = False

    def _own(self) -> None:
        if self._lent:
            self._buffers = {name: value.clone() for name, value in self._buffers.items()}
            self._lent = False

"""Segments: settled slots, which no longer change, in the layouts they are held in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import Payload, tensors
from diffcache.kv.slots import EMPTY, Slots, join, join_meta, one_row, pick, span


@dataclass(frozen=True)
class Traits:
    """Settings of the attention to a segment.

    Attributes:
        temperature: Divisor of the segment's logits.
        lse_scale: Factor of its log-sum-exp before it is merged with the rest.
        apart: True attends to it on its own and merges by log-sum-exp.
    """

    temperature: float = 1.0
    lse_scale: float = 1.0
    apart: bool = False


PLAIN = Traits()


class Segment(ABC):
    """Settled slots of all rows of a layer; never written to, so that forks may share them."""

    traits: Traits
    coded: ClassVar[bool] = False  # taking slots keeps their codes
    level: int  # 0 is exact, n is held by the n-th codec of the recipe's ladder

    @property
    @abstractmethod
    def width(self) -> int:
        """Slots of the longest row, as `read` shows them."""

    @property
    def first(self) -> int | None:
        """The first position, where positions follow one another and slots stand for one token."""
        return None

    @abstractmethod
    def metadata(self) -> dict[str, Tensor]:
        """Return the metadata of the slots, [B or 1, 1 or H, S]; nothing is decoded."""

    @cached_property
    def whole(self) -> bool:
        """Return whether no slot is empty; the device is read once, as a segment never changes."""
        return self.first is not None or bool((self.metadata()["pos"] >= 0).all())

    @abstractmethod
    def read(self) -> Slots:
        """Return the slots, decoded and padded."""

    def read_into(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Write what `read` returns into tensors of any strides, and return the metadata."""
        slots = self.read()
        k.copy_(slots.k)
        v.copy_(slots.v)
        return slots.meta

    def read_at(self, index: Tensor, keep: Tensor | None = None) -> Slots:
        """Return chosen slots, decoded; no others are where the layout allows it.

        Args:
            index: int64 [B, H, n], slots of each row as `read` shows them.
            keep: bool like `index`; the others come out empty. None keeps all.
        """
        return self.read().gather(index, keep)

    @abstractmethod
    def take(self, index: Tensor, keep: Tensor) -> Segment:
        """Return chosen slots, none of which is coded anew.

        Args:
            index: int64 [B, H, n], slots of each row as `read` shows them.
            keep: bool [B, H, n]; the others come out empty.
        """

    @abstractmethod
    def rows(self, index: Tensor) -> Segment:
        """Return batch rows, int64 [m]."""


@dataclass(frozen=True, eq=False)
class Dense(Segment):
    """Exact slots, every row as long as the longest.

    Attributes:
        slots: The slots.
        below: Bound above their positions; None: no lower one than that of the layer is known.
    """

    slots: Slots
    traits: Traits = PLAIN
    level: int = 0
    below: int | None = None

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        return self.slots.width

    def metadata(self) -> dict[str, Tensor]:
        """Return the metadata of the slots."""
        return self.slots.meta

    def read(self) -> Slots:
        """Return the slots."""
        return self.slots

    def take(self, index: Tensor, keep: Tensor) -> Dense:
        """Return chosen slots."""
        return replace(self, slots=self.slots.gather(index, keep))

    def rows(self, index: Tensor) -> Dense:
        """Return batch rows."""
        if self.slots.k.shape[0] == 1:  # shared by all rows
            return self
        return replace(self, slots=self.slots.rows(index))


@dataclass(frozen=True, eq=False)
class Flat(Segment):
    """Exact slots, row after row with nothing between them: ragged budgets hold what they keep.

    This is the layout of variable-length attention kernels: N slots of all rows of all batch
    entries in one tensor.

    Attributes:
        k: [N, D].
        v: [N, Dv].
        meta: Metadata by name, [N].
        lengths: int64 [B, H], slots of each row.
        longest: Slots of the longest row.
    """

    k: Tensor
    v: Tensor
    meta: dict[str, Tensor]
    lengths: Tensor
    longest: int
    traits: Traits = PLAIN
    level: int = 0

    @classmethod
    def of(cls, slots: Slots, traits: Traits = PLAIN) -> Flat:
        """Return the slots that are not empty."""
        batch, heads = slots.k.shape[:2]
        valid = slots.valid.expand(batch, heads, -1)
        meta = {name: value.expand(batch, heads, -1)[valid] for name, value in slots.meta.items()}
        lengths = valid.sum(-1)
        longest = int(lengths.max()) if lengths.numel() else 0
        return cls(slots.k[valid], slots.v[valid], meta, lengths, longest, traits)

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        return self.longest

    @property
    def offsets(self) -> Tensor:
        """Beginnings of all rows and the end of the last, int32 [B * H + 1], as kernels want it."""
        ends = self.lengths.flatten().cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return where each padded slot is in [N], int64 [B, H, S], and whether it is there."""
        ends = self.lengths.flatten().cumsum(0).view_as(self.lengths)
        order = torch.arange(self.longest, device=self.k.device)
        there = order < self.lengths[..., None]
        return ((ends - self.lengths)[..., None] + order).where(there, 0), there

    def metadata(self) -> dict[str, Tensor]:
        """Return the metadata of the slots, padded."""
        return self._padded(*self._places())

    def _padded(self, place: Tensor, there: Tensor) -> dict[str, Tensor]:
        meta = {name: value[place] for name, value in self.meta.items()}
        meta["pos"] = meta["pos"].where(there, EMPTY)
        return meta

    def read(self) -> Slots:
        """Return the slots, padded; empty ones are zero."""
        place, there = self._places()
        spread = there[..., None]
        return Slots(self.k[place] * spread, self.v[place] * spread, self._padded(place, there))

    def take(self, index: Tensor, keep: Tensor) -> Flat:
        """Return chosen slots."""
        return Flat.of(self.read().gather(index, keep), self.traits)

    def rows(self, index: Tensor) -> Flat:
        """Return batch rows; what is known of S slots stays that of S, though the longest goes."""
        return replace(Flat.of(self.read().rows(index), self.traits), longest=self.longest)


@dataclass(frozen=True, eq=False)
class Coded(Segment):
    """Slots whose keys and values a codec holds.

    Attributes:
        k: Keys, [B, H, S, D] when decoded.
        v: Values of the first U slots.
        meta: Metadata by name, [B, 1 or H, S]; without `pos` where positions follow one another.
        size: S.
        start: First position, if positions are not in `meta`.
        exact: Values that are not coded yet, [B, H, S - U, Dv].
    """

    coded: ClassVar[bool] = True
    k: Payload
    v: Payload
    meta: dict[str, Tensor]
    size: int
    start: int = 0
    exact: Tensor | None = None
    traits: Traits = PLAIN
    level: int = 0

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        return self.size

    @property
    def first(self) -> int | None:
        """The first position, where it and what slots stand for are not in `meta`."""
        return None if "pos" in self.meta or "logn" in self.meta else self.start

    def metadata(self) -> dict[str, Tensor]:
        """Return the metadata of the slots, positions included."""
        return self.known(1, next(tensors([self.meta, self.k])).device)

    def read(self) -> Slots:
        """Return the slots, decoded."""
        k = self.k.decode()
        if self.exact is None:
            return Slots(k, self.v.decode(), self.known(k.shape[0], k.device))
        v = self.exact.new_empty(*k.shape[:3], self.exact.shape[3])
        self._read_values(v)
        return Slots(k, v, self.known(k.shape[0], k.device))

    def read_into(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Decode into tensors, and return the metadata."""
        self.k.decode_into(k)
        self._read_values(v)
        return self.known(k.shape[0], k.device)

    def _read_values(self, v: Tensor) -> None:
        if self.exact is None:
            self.v.decode_into(v)
            return
        coded = self.size - self.exact.shape[2]
        self.v.decode_into(v[:, :, :coded])
        v[:, :, coded:] = self.exact

    def read_at(self, index: Tensor, keep: Tensor | None = None) -> Slots:
        """Decode chosen slots and no others."""
        known = self.known(len(index), index.device)
        meta = {name: pick(value, index) for name, value in known.items()}
        if keep is not None:
            meta["pos"] = meta["pos"].where(keep, EMPTY)
        if self.exact is None:
            return Slots(self.k.decode_at(index), self.v.decode_at(index), meta)
        coded = self.size - self.exact.shape[2]
        late = index - coded
        exact = gather_slots(self.exact, late.clamp_min(0))
        v = self.v.decode_at(index.clamp_max(coded - 1)) if coded else exact
        return Slots(self.k.decode_at(index), exact.where((late >= 0)[..., None], v), meta)

    def take(self, index: Tensor, keep: Tensor) -> Coded:
        """Return chosen slots, codes as they are; raise ValueError if some values are not coded yet."""
        if self.exact is not None:
            raise ValueError("values that are not coded yet: align the segment before taking")
        heads = index.shape[1]
        meta = {
            name: value.expand(-1, heads, -1).gather(2, index)
            for name, value in self.known(index.shape[0], index.device).items()
        }
        meta["pos"] = meta["pos"].where(keep, EMPTY)
        return replace(self, k=self.k.take(index), v=self.v.take(index), meta=meta, size=index.shape[2])

    def rows(self, index: Tensor) -> Coded:
        """Return batch rows."""
        meta = {name: value.index_select(0, index) for name, value in self.meta.items()}
        exact = None if self.exact is None else self.exact.index_select(0, index)
        return replace(self, k=self.k.rows(index), v=self.v.rows(index), meta=meta, exact=exact)

    def known(self, batch: int, device: torch.device) -> dict[str, Tensor]:
        """Return the metadata of B rows, positions included."""
        if "pos" in self.meta:
            return dict(self.meta)
        return {**self.meta, "pos": span(self.start, self.start + self.size, batch, device)}


def read_all(segments: Sequence[Segment], tail: Slots | None) -> Slots:
    """Return segments, and a tail if any, one after the other; codes are decoded to where they end up."""
    if tail is None or not any(segment.coded for segment in segments):
        parts = [segment.read() for segment in segments]
        return join(parts if tail is None else [*parts, tail])
    width = sum(segment.width for segment in segments)
    k, v = (x.new_empty(*x.shape[:2], width + tail.width, x.shape[3]) for x in (tail.k, tail.v))
    k[:, :, width:], v[:, :, width:] = tail.k, tail.v
    metas, first = [], 0
    for segment in segments:
        last = first + segment.width
        metas.append(segment.read_into(k[:, :, first:last], v[:, :, first:last]))
        first = last
    return Slots(k, v, join_meta([*metas, tail.meta]))


def leveled(segment: Segment) -> Segment:
    """Return a segment whose coded slots have one row of metadata, where all heads have the same.

    The device is read, so this is for when slots are dropped.
    """
    return replace(segment, meta=one_row(segment.meta)) if isinstance(segment, Coded) else segment

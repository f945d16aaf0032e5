"""Slots as queries meet them: read, still coded, or chosen and not gathered yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import attention
from diffcache.kernels.attention import Codes
from diffcache.kv.codec.base import Payload
from diffcache.kv.codec.quant import Quantized
from diffcache.kv.positions import PositionMap, key_places
from diffcache.kv.rotary import Rotation
from diffcache.kv.segment import PLAIN, Coded, Segment, Traits, read_all
from diffcache.kv.slots import EMPTY, Slots, join_meta, pick

# First slot, the one after the last, keys and values.
Piece = tuple[int, int, attention.Held, attention.Held]
Held = tuple[int, Tensor | Payload]  # slots of a part, its keys or values


@dataclass(frozen=True)
class Unread:
    """Slots that are decoded, and keys rotated, when they are asked for.

    Attributes:
        segments: First slots.
        tail: Last slots, exact; None for none. There is at least one segment or a tail.
        rotary: Rotation of keys; None where they are stored as queries meet them.
        positions: Numbers that keys are rotated under; None: their own.
    """

    segments: tuple[Segment, ...]
    tail: Slots | None
    rotary: Rotation | None = None
    positions: PositionMap | None = None

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        own = 0 if self.tail is None else self.tail.width
        return sum(segment.width for segment in self.segments) + own

    @cached_property
    def meta(self) -> dict[str, Tensor]:
        """Metadata of the slots; nothing is decoded."""
        parts = [segment.metadata() for segment in self.segments]
        parts += [] if self.tail is None else [self.tail.meta]
        return parts[0] if len(parts) == 1 else join_meta(parts)

    def read(self) -> Slots:
        """Return the slots, decoded and rotated."""
        slots = read_all(self.segments, self.tail)
        if self.rotary is None:
            return slots
        at = key_places(self.positions, slots.meta, self.rotary)
        return replace(slots, k=self.rotary.rotate(slots.k, at))

    def held(self) -> tuple[list[Held], list[Held]]:
        """Return how many slots each part has, and its keys and values, coded where they are.

        Keys are as queries meet them: where they are rotated they are decoded, but for rounding.
        """
        keys: list[Held] = []
        values: list[Held] = []
        for segment in self.segments:
            if not isinstance(segment, Coded):
                slots = segment.read()
                keys.append((slots.width, slots.k))
                values.append((slots.width, slots.v))
                continue
            exact = segment.exact
            late = 0 if exact is None else exact.shape[2]
            keys.append((segment.width, segment.k))
            values += [(segment.width - late, segment.v)] if late < segment.width else []
            values += [] if exact is None else [(late, exact)]
        if self.tail is not None:
            keys.append((self.tail.width, self.tail.k))
            values.append((self.tail.width, self.tail.v))
        if self.rotary is None:
            return keys, values
        at, first = key_places(self.positions, self.meta, self.rotary), 0
        for number, (count, k) in enumerate(keys):
            exact = k if isinstance(k, Tensor) else k.near()
            keys[number] = count, self.rotary.rotate(exact, at[:, :, first : first + count])
            first += count
        return keys, values

    def turns(self, q: Tensor) -> dict[str, Any]:
        """Return cosines and sines of keys as kernels take them, for q [B, Hq, n, D]; nothing where they do not."""
        rotary = self.rotary
        if rotary is None or rotary.start or rotary.channels != q.shape[3]:
            return {}
        angles = rotary.angles(key_places(self.positions, self.meta, rotary), q)
        both = torch.cat([angles.cos(), angles.sin()], -1) * rotary.scale
        return {"turns": both.float(), "interleaved": rotary.interleaved}

    def pieces(self) -> list[Piece]:
        """Return the slots in parts, each coded as a kernel takes codes, or exact."""
        found: list[Piece] = []
        first = 0
        for segment in self.segments:
            stop = first + segment.width
            k = v = None
            if isinstance(segment, Coded):
                k, v = codes_of(segment.k), codes_of(segment.v)
            if not isinstance(segment, Coded) or k is None or v is None:
                slots = segment.read()
                found.append((first, stop, slots.k, slots.v))
            else:
                exact = segment.exact
                coded = segment.width - (0 if exact is None else exact.shape[2])
                if coded:  # keys may be more: attention is to those whose values are coded
                    found.append((first, first + coded, k, v))
                if exact is not None and exact.shape[2]:  # values that wait, a group of them
                    at = torch.arange(coded, segment.width, device=exact.device)
                    late = segment.k.decode_at(at.expand(*exact.shape[:2], -1))
                    found.append((first + coded, stop, late, exact))
            first = stop
        if self.tail is not None:
            found.append((first, first + self.tail.width, self.tail.k, self.tail.v))
        return found


def codes_of(held: Payload) -> Codes | None:
    """Return codes as kernels take them; None where a codec has others."""
    if not isinstance(held, Quantized) or held.grid.of is not None or not held.grid.each:
        return None
    codec = held.codec
    if codec.bits not in (2, 4, 8) or held.codes.shape[3] * 8 != held.size * codec.bits:
        return None
    width = codec.width(held.size) if codec.along == "channels" else 1
    return Codes(held.codes, held.grid.values, int(codec.bits), held.grid.each, width, -codec.intervals / 2)


@dataclass(frozen=True)
class ListedView:
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

    @cached_property
    def meta(self) -> dict[str, Tensor]:
        """Metadata of the slots; nothing is gathered but that."""
        found = {name: pick(value, self.index) for name, value in self.slots.meta.items()}
        if self.keep is not None:
            found["pos"] = found["pos"].where(self.keep, EMPTY)
        return found

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

    source: Slots | Unread | ListedView
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

    @property
    def meta(self) -> dict[str, Tensor]:
        """Metadata of the slots; nothing is decoded or gathered."""
        return self.source.meta

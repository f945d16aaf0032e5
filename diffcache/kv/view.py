"""Slots as queries meet them: read, still coded, or chosen and not gathered yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from diffcache.kv.segment import PLAIN, Segment, Traits, read_all
from diffcache.kv.slots import Slots


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

"""The row plan: which positions of every sequence one forward computes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffcache.kv.refresh import slots_of
from diffcache.method import check_int


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Positions that one forward computes; all others are served from what is held.

    Attributes:
        rows: Positions in ascending order, int64 `[B, n]`, filled up by repeating the last one of a
            sequence, since computing a row twice is computing it once; a range where all sequences
            compute the same run of positions; None for all positions.
        seen: Positions that the rows see, padding aside, bool `[B, T]`; None for all of them.
        block: Tokens of a block of attention, where a row sees its own block and those before it
            alone; None where it sees all.
        masks_itself: Whether the model makes the mask of such blocks, and is given none.
        compiled: Whether the forward of some rows is compiled.
        narrows: Whether masks that may be committed are left out on purpose, and so are not
            committed.
        compiles: Whether a compiled forward serves plans of this kind.
    """

    narrows: ClassVar[bool] = False
    compiles: ClassVar[bool] = True

    rows: Tensor | range | None = None
    seen: Tensor | None = field(default=None, kw_only=True)
    block: int | None = field(default=None, kw_only=True)
    masks_itself: bool = field(default=False, kw_only=True)
    compiled: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, chosen: Tensor, multiple: int = 1) -> RowPlan:
        """Return the plan of chosen positions, bool `[B, T]`. The host waits for their number, once.

        Rows of a sequence are filled up to a multiple, so that compiled blocks meet few sizes.
        Raises ValueError if no position is chosen.
        """
        if multiple != 1:
            check_int("multiple", multiple, 1)
        rows = numbers_of(chosen)
        count = rows.shape[1]
        if not count:
            raise ValueError("chosen: names no position; a forward computes at least one")
        more = min(-count % multiple, chosen.shape[1] - count)
        if more:
            rows = torch.cat([rows, rows[:, -1:].expand(-1, more)], dim=1)
        return cls(rows)

    def twice(self) -> RowPlan:
        """Return the plan of a batch that has every sequence a second time, after all of them."""
        own: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        both: dict[str, Any] = {k: torch.cat([v, v]) for k, v in own.items() if isinstance(v, Tensor)}
        return replace(self, **both)

    def count(self, width: int) -> int:
        """Return the rows that are computed in each sequence of `width` positions."""
        if self.rows is None:
            return width
        return len(self.rows) if isinstance(self.rows, range) else self.rows.shape[1]

    def index(self, batch: int, width: int, device: torch.device) -> Tensor:
        """Return the positions as a tensor, int64 `[B, n]`."""
        if isinstance(self.rows, Tensor):
            return self.rows
        run = range(width) if self.rows is None else self.rows
        return torch.arange(run.start, run.stop, device=device).expand(batch, -1)

    def take(self, *given: Tensor) -> list[Tensor]:
        """Return the columns of each `[1 or B, T, ...]` that are computed, `[1 or B, n, ...]`."""
        rows = self.rows
        if rows is None:
            return list(given)
        if isinstance(rows, range):
            return [x[:, rows.start : rows.stop] for x in given]
        return [picked(x, rows) for x in given]

    def mask(self, batch: int, width: int, device: torch.device) -> Tensor:
        """Return which positions are computed, bool `[B, T]`."""
        fed = torch.zeros(batch, width, dtype=torch.bool, device=device)
        return fed.scatter_(1, self.index(batch, width, device), True)


ALL = RowPlan()


def numbers_of(chosen: Tensor) -> Tensor:
    """Return chosen positions, bool `[B, T]`, as numbers, filled up by repeating the last one, int64 `[B, n]`.

    The host waits for their number.
    """
    if chosen.shape[0] == 1:  # nothing to fill up
        return chosen[0].nonzero().mT
    return slots_of(chosen)


def picked(x: Tensor, rows: Tensor) -> Tensor:
    """Return positions `[B, n]` of each sequence of `[1 or B, T, ...]`."""
    count = rows.shape[0]
    if count == 1:
        return x.index_select(1, rows[0])
    return x.expand(count, *x.shape[1:])[torch.arange(count, device=rows.device)[:, None], rows]


def put(held: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
    """Write positions `[B, n]` of each sequence of `[B, T, ...]` in place; return all."""
    if rows.shape[0] == 1:  # copies whole rows, three times as fast
        return held.index_copy_(1, rows[0], fresh)
    held[torch.arange(rows.shape[0], device=rows.device)[:, None], rows] = fresh
    return held

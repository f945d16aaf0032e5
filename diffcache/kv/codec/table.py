"""Tables of rows that several slots share, and the row that each slot uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots


class RowRun(NamedTuple):
    """Rows in order that as many slots use each: slots `first` to `stop`, `each` of a row."""

    row: int
    rows: int
    first: int
    each: int

    @property
    def stop(self) -> int:
        """The slot after the last."""
        return self.first + self.rows * self.each


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Rows that slots share: scales of a group of tokens, factors of an encoded block.

    While slots use the rows in runs of one length nothing is stored beside the rows. Taking slots
    out of order keeps the number of the row for every slot instead, in the narrowest integer.

    Args:
        values: `[B, H, T, ...]`, T rows.
        each: Consecutive slots that use one row, where `of` is None; slot `s` uses `s // each`.
        of: `[B, H, S]` uint8, int16 or int32, row of each slot, or None.

    Raises:
        ValueError: If `each` is negative.
    """

    values: Tensor
    each: int
    of: Tensor | None = None

    def __post_init__(self) -> None:
        if self.each < 0:
            raise ValueError(f"each={self.each}: must be at least 0 slots")

    @staticmethod
    def single(row: Tensor, slots: int) -> SlotTable:
        """Return a table of one row `[B, H, ...]` that `slots` slots use."""
        if not slots:
            return SlotTable(row.new_empty(*row.shape[:2], 0, *row.shape[2:]), 1)
        return SlotTable(row.unsqueeze(2), slots)

    def of_slots(self) -> Tensor:
        """Return the row of each slot, `[B, H, S]` int64."""
        if self.of is not None:
            return self.of.long()
        batch, heads, count = self.values.shape[:3]
        rows = torch.arange(count, device=self.values.device).repeat_interleave(self.each)
        return rows.expand(batch, heads, -1)

    @cached_property
    def runs(self) -> list[RowRun] | None:
        """Runs of rows in order, the same in all rows and heads; None where slots were taken."""
        if self.of is None:
            return [RowRun(0, self.values.shape[2], 0, self.each)]
        row = self.of[0, 0].long()
        used, counts = row.unique_consecutive(return_counts=True)
        in_order = torch.equal(used, torch.arange(self.values.shape[2], device=used.device))
        if not in_order or not bool((self.of == self.of[:1, :1]).all()):
            return None
        found: list[RowRun] = []
        for number, each in enumerate(counts.tolist()):
            if found and found[-1].each == each:
                found[-1] = found[-1]._replace(rows=found[-1].rows + 1)
            else:
                found.append(RowRun(number, 1, found[-1].stop if found else 0, each))
        return found

    def lookup(self) -> Tensor:
        """Return the row of each slot, `[B, H, S, ...]`; a view where one row is for all."""
        if self.of is not None:
            return gather_slots(self.values, self.of.long())
        batch, heads, count, *tail = self.values.shape
        spread = self.values.unsqueeze(3).expand(batch, heads, count, self.each, *tail)
        return spread.reshape(batch, heads, count * self.each, *tail)

    def lookup_at(self, index: Tensor) -> Tensor:
        """Return the rows of the slots at `index`, `[B, H, n]` int64, as `[B, H, n, ...]`."""
        if self.of is not None:
            rows = self.of.gather(2, index).long()
        else:
            rows = index if self.each == 1 else index.div(self.each, rounding_mode="floor")
        return gather_slots(self.values, rows)

    def take(self, index: Tensor) -> SlotTable:
        """Keep the slots at `index`, `[B, H, n]` int64, and drop rows that no head uses."""
        if self.of is None and self.each == 1:
            return SlotTable(gather_slots(self.values, index), 1)
        return regular(self.values, self.of_slots().gather(2, index), self.each)

    def rows(self, index: Tensor) -> SlotTable:
        """Keep the batch rows at `index`, `[m]` int64."""
        of = None if self.of is None else self.of[index]
        return SlotTable(self.values[index], self.each, of)


def joined_slots(parts: Sequence[Tensor]) -> Tensor:
    """Return slots of runs, `[B, H, t, S', ...]` each, one after the other."""
    flat = [part.flatten(2, 3) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 2)


def regular(values: Tensor, of: Tensor, each: int) -> SlotTable:
    """Return a table without row numbers where runs of slots allow it, else a compact one.

    Args:
        values: `[B, H, T, ...]`.
        of: `[B, H, n]` int64, row of each slot.
        each: Length of a run to look for, in slots; one run over all slots is found first.
    """
    batch, heads, slots = of.shape
    for run in (max(slots, 1), each):
        if slots % run == 0 and (run > 1 or slots <= 1):
            blocks = of.reshape(batch, heads, slots // run, run)
            if bool((blocks == blocks[..., :1]).all()):
                return SlotTable(gather_slots(values, blocks[..., 0]), run)
    order, places = compact(of, values.shape[2])
    if order.shape[2] < values.shape[2]:
        values, of = gather_slots(values, order), places
    return SlotTable(values, each, narrow(of, values.shape[2]))


def compact(of: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return which of `size` things are used, and the numbers among these.

    Args:
        of: `[B, H, n]` int64, numbers below `size`.
        size: Number of things.

    Returns:
        `[B, H, m]` int64, the used things in order, filled up with others to the most that any
        row and head uses; and `of` as places in it, `[B, H, n]` int64.
    """
    used = torch.zeros((*of.shape[:2], size), dtype=torch.bool, device=of.device)
    used.scatter_(2, of, True)
    most = int(used.sum(2).max()) if used.numel() else 0
    order = (~used).to(torch.uint8).argsort(dim=2, stable=True)[..., :most]
    return order, (used.cumsum(2) - 1).gather(2, of)


def narrow(index: Tensor, size: int) -> Tensor:
    """Return an index below `size` in the narrowest integer dtype that holds it."""
    if size <= 256:
        return index.to(torch.uint8)
    return index.to(torch.int16 if size <= 32768 else torch.int32)


def join_tables(tables: Sequence[SlotTable]) -> SlotTable:
    """Append tables along the slots, with row numbers only where the runs differ.

    Tables of one and the same row become one table of that row.
    """
    tables = [table for table in tables if table.values.shape[2]] or list(tables[:1])
    first = tables[0].values
    single = all(t.of is None and t.values.shape[2] == 1 for t in tables)
    if single and all(torch.equal(first, t.values) for t in tables[1:]):
        return SlotTable(first, sum(t.each for t in tables))
    with torch.autocast(first.device.type, enabled=False):  # it joins its own dtypes
        values = torch.cat([table.values for table in tables], 2)
    each = tables[0].each
    if all(table.of is None and table.each == each for table in tables):
        return SlotTable(values, each)
    starts, total = [], 0
    for table in tables:
        starts.append(total)
        total += table.values.shape[2]
    of = torch.cat([t.of_slots() + start for t, start in zip(tables, starts, strict=True)], 2)
    return SlotTable(values, each, narrow(of, total))

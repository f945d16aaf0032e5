"""Slots: keys, values and what is known of each of them, padded to a rectangle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kernels.move import kv_gather

EMPTY = -1
# What a slot without an entry is taken to have; a rotary position is that of the slot itself.
_FILL: Mapping[str, tuple[torch.dtype, float]] = {
    "pos": (torch.int32, EMPTY),
    "logn": (torch.float32, 0.0),
    "tag": (torch.int32, 0),
    "ver": (torch.int32, 0),
}


@dataclass(frozen=True)
class Slots:
    """Keys, values and metadata of S slots a row, a row being a batch entry and key-value head.

    Attributes:
        k: [B, H, S, D].
        v: [B, H, S, Dv].
        meta: Metadata by name, [B, 1 or H, S]: `pos` int32, the logical position, -1 where empty;
            and where wanted `rpos` int32, the rotary position; `logn` float32, the logarithm of how
            many tokens a slot stands for, added to its logit; `tag` int32, whatever the user says
            of a token (frame, sentence, modality); `ver` int32, when it was written last.
    """

    k: Tensor
    v: Tensor
    meta: dict[str, Tensor]

    @property
    def width(self) -> int:
        """Slots a row, empty ones included."""
        return self.k.shape[2]

    @property
    def pos(self) -> Tensor:
        """Logical positions, int32 [B, 1 or H, S]."""
        return self.meta["pos"]

    @property
    def valid(self) -> Tensor:
        """Slots that hold a token, bool [B, 1 or H, S]."""
        return self.meta["pos"] >= 0

    @property
    def rpos(self) -> Tensor:
        """Rotary positions, int32 [B, 1 or H, S]; 0 in empty slots."""
        return self.meta.get("rpos", self.meta["pos"]).clamp_min(0)

    def column(self, name: str) -> Tensor:
        """Return metadata of a name, [B, 1 or H, S], filled in where nothing was said of it."""
        return self.meta[name] if name in self.meta else filled(name, self.pos)

    def gather(self, index: Tensor, keep: Tensor | None = None) -> Slots:
        """Return slots in another order.

        Args:
            index: int64 [B, 1 or H, n], slots of each row.
            keep: bool like `index`; the others come out empty.
        """
        if len(self.k) < len(index):  # one row that is shared by all
            meta = {name: value.expand(len(index), -1, -1) for name, value in self.meta.items()}
            k, v = (x.expand(len(index), -1, -1, -1) for x in (self.k, self.v))
            return Slots(k, v, meta).gather(index, keep)
        meta = {name: pick(value, index) for name, value in self.meta.items()}
        if keep is not None:
            meta["pos"] = meta["pos"].where(keep, torch.full_like(meta["pos"], EMPTY))
        return Slots(*kv_gather(self.k, self.v, index), meta)

    def narrow(self, start: int, stop: int) -> Slots:
        """Return slots `start` to `stop`, as views."""
        meta = {name: value[..., start:stop] for name, value in self.meta.items()}
        return Slots(self.k[:, :, start:stop], self.v[:, :, start:stop], meta)

    def rows(self, index: Tensor) -> Slots:
        """Return batch rows, int64 [m]."""
        meta = {name: value.index_select(0, index) for name, value in self.meta.items()}
        return Slots(self.k.index_select(0, index), self.v.index_select(0, index), meta)

    def clone(self) -> Slots:
        """Return a copy that shares no memory and holds no more than it shows."""
        meta = {name: value.clone() for name, value in self.meta.items()}
        return Slots(_copy(self.k), _copy(self.v), meta)


@dataclass(frozen=True, eq=False)
class SlotIndex:
    """Slots by number that were checked once, however many layers are written to.

    Attributes:
        index: int64 [n] or [B, n].
        start: Number that no slot is before.
        stop: Number that all slots are before.
    """

    index: Tensor
    start: int
    stop: int

    @classmethod
    def of(cls, index: Tensor, stop: int, start: int = 0) -> SlotIndex:
        """Check slots. A GPU does so on its own, as reading them would make the host wait.

        Args:
            index: int64 [n] or [B, n].
            stop: Number that all slots must be before.
            start: Number that no slot may be before.

        Raises:
            ValueError: If a slot is not there; on CUDA, its own error, later.
        """
        if index.device.type == "cuda":
            torch._assert_async(((index >= start) & (index < stop)).all())
            return cls(index, start, stop)
        if not index.numel():
            return cls(index, stop, stop)
        ends = torch.aminmax(index)
        least, most = int(ends.min), int(ends.max)
        if not start <= least <= most < stop:
            raise ValueError(outside(least, most, start, stop))
        return cls(index, least, most + 1)


def checked(index: Tensor | range, stop: int, before: SlotIndex | range | None = None) -> SlotIndex | range:
    """Return slots that are checked, unless these very ones were checked before.

    Args:
        index: int64 [n] or [B, n]; or a run of slots, which needs no check.
        stop: Number that all slots must be before.
        before: Last result of this function.

    Raises:
        ValueError: If a slot is not there; on CUDA, its own error, later.
    """
    if isinstance(index, range):
        return index
    if isinstance(before, SlotIndex) and before.index is index:
        return before
    return SlotIndex.of(index, stop)


def outside(least: int, most: int, start: int, stop: int) -> str:
    """Return what is wrong with slots `least` to `most`, where `start` to `stop` are there."""
    return f"index={least}..{most}: slots {start} to {stop - 1} can be overwritten; what is before them is settled"


def join(parts: Sequence[Slots]) -> Slots:
    """Return slots one after the other; metadata that some lack is filled in."""
    if len(parts) == 1:
        return parts[0]
    meta = join_meta([part.meta for part in parts])
    batch = max(part.k.shape[0] for part in parts)
    return Slots(
        torch.cat([part.k.expand(batch, -1, -1, -1) for part in parts], 2),
        torch.cat([part.v.expand(batch, -1, -1, -1) for part in parts], 2),
        meta,
    )


def join_meta(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return metadata of slots one after the other; what some lack is filled in."""
    names = {name for part in parts for name in part}
    found = {}
    for name in sorted(names):
        columns = [part[name] if name in part else filled(name, part["pos"]) for part in parts]
        found[name] = torch.cat(level_heads(columns), -1)
    return found


def chosen(mask: Tensor, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the slots that a mask names, in order, rows filled up to the longest.

    Args:
        mask: bool [B, 1 or H, S].
        longest: Most slots that a row names, where that is known: it is then not looked up, for
            which the host would wait.

    Returns:
        int64 [B, 1 or H, n], and bool, False where a row is filled up.
    """
    count = mask.sum(-1, keepdim=True)
    if longest is None:
        longest = int(count.max()) if mask.numel() else 0
    place = (mask.cumsum(-1) - 1).where(mask, longest)
    order = torch.arange(mask.shape[2], device=mask.device).expand_as(mask)
    index = place.new_zeros(*mask.shape[:2], longest + 1).scatter_(2, place, order)
    keep = torch.arange(longest, device=mask.device) < count
    return index[..., :longest].where(keep, 0), keep


def named(which: Tensor, pos: Tensor) -> Tensor:
    """Return slots that are named by a mask or by number as a mask, empty ones left out.

    Args:
        which: bool [S] or [B, 1 or H, S]; or int64 [n] or [B, 1 or H, n], from 0 to S - 1.
        pos: Positions of all slots, int32 [B, 1 or H, S].

    Returns:
        bool [B, 1 or H, S].

    Raises:
        ValueError: If a mask is of another number of slots, or the dtype or shape is another.
    """
    width = pos.shape[-1]
    fits = which.dim() in (1, 3) and which.dtype in (torch.bool, torch.int64)
    if not fits or (which.dtype == torch.bool and which.shape[-1] != width):
        raise ValueError(
            f"which={list(which.shape)} of {which.dtype}: must be bool [S] or [B, 1 or H, S] of "
            f"the S={width} slots, or int64 [n] or [B, 1 or H, n]"
        )
    wide = which if which.dim() == 3 else which[None, None]
    if which.dtype != torch.bool:
        none = torch.zeros(*wide.shape[:2], width, dtype=torch.bool, device=pos.device)
        wide = none.scatter_(-1, wide, True)
    return wide & (pos >= 0)


def one_row(meta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return metadata with one row for all heads where these have the same.

    The device is read if there are rows to compare, so this is for when slots are dropped.
    """
    wide = [column for column in meta.values() if column.shape[1] > 1]
    if not wide:
        return dict(meta)
    same = torch.stack([(column == column[:, :1]).all() for column in wide]).all()
    if not bool(same):
        return dict(meta)
    return {name: column[:, :1].clone() for name, column in meta.items()}


def filled(name: str, pos: Tensor) -> Tensor:
    """Return what slots at these positions [B, 1 or H, S] have where nothing was said of it."""
    if name == "rpos":
        return pos
    dtype, value = fill_of(name)
    return torch.full(pos.shape, value, dtype=dtype, device=pos.device)


def fill_of(name: str) -> tuple[torch.dtype, float]:
    """Return the dtype of a metadata, and what slots have where nothing was said of it."""
    return _FILL.get(name, (torch.float32, 0.0))


def level_heads(columns: Sequence[Tensor]) -> list[Tensor]:
    """Return columns [B, 1 or H, S] with as many rows and heads as the largest has."""
    batch, heads = (max(column.shape[axis] for column in columns) for axis in (0, 1))
    return [column.expand(batch, heads, -1) for column in columns]


def span(start: int, stop: int, batch: int, device: torch.device) -> Tensor:
    """Return positions `start` to `stop`, int32 [B, 1, n], one row in memory."""
    return torch.arange(start, stop, dtype=torch.int32, device=device).expand(batch, 1, -1)


def pick(column: Tensor, index: Tensor) -> Tensor:
    """Return metadata [B, 1 or H, S] at some slots, int64 [B, 1 or H, n]."""
    batch, heads = (max(column.shape[axis], index.shape[axis]) for axis in (0, 1))
    return column.expand(batch, heads, -1).gather(2, index.expand(batch, heads, -1))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def writable(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy of it where torch lets nobody write to it."""
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.clone() if frozen else tensor

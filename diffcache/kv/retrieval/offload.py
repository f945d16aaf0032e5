"""Keys or values below the device, of which only the blocks that are read come back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final
from uuid import uuid4

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import Payload, TensorCodec, all_of, checked
from diffcache.kv.life.tiers import Tiers
from diffcache.kv.settings import Count


class Lease:
    """Blocks that are held in tiers for as long as this object lives."""

    def __init__(self, tiers: Tiers, blocks: Sequence[Tensor]) -> None:
        self.keys = tuple(uuid4().hex for _ in blocks)
        for key, block in zip(self.keys, blocks, strict=True):
            tiers.put(key, block)
        weakref.finalize(self, _drop, tiers, self.keys)


def _drop(tiers: Tiers, keys: Sequence[str]) -> None:
    for key in keys:
        tiers.drop(key)


@dataclass(frozen=True, eq=False)
class Lent(Payload):
    """Slots whose blocks are in tiers.

    Taking slots or rows fetches nothing; decoding fetches the blocks that are asked for.

    Args:
        tiers: Tiers that hold the blocks.
        leases: Leases that keep the blocks there.
        block: Slots of a block.
        like: An empty tensor [0, H, 0, D] of the dtype and device that was given.
        row: int64 [T, B], batch row within each of the T blocks that each row is read from.
        place: int64 [B, H, S], number of each slot in the blocks; None for all in order.
    """

    tiers: Tiers
    leases: tuple[Lease, ...]
    block: int
    like: Tensor
    row: Tensor
    place: Tensor | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the blocks."""
        return tuple(key for lease in self.leases for key in lease.keys)

    def decode(self) -> Tensor:
        """Return `[B, H, S, D]`, fetching the blocks it needs, each once."""
        keys, place = self.keys, self.places()
        wanted = (place // self.block).unique()
        if not wanted.numel():
            size = (*place.shape, self.like.shape[3])
            return self.like.new_empty(size)
        names = [keys[number] for number in wanted.tolist()]
        self.tiers.prefetch(names)
        rows = self.row[wanted]
        found = torch.cat([self.tiers.get(name)[row] for name, row in zip(names, rows, strict=True)], 2)
        if self.place is None:
            return found
        order = torch.searchsorted(wanted, place // self.block)
        return gather_slots(found, order * self.block + place % self.block)

    def take(self, index: Tensor) -> Lent:
        """Choose slots."""
        return replace(self, place=self.places().gather(2, index))

    def rows(self, index: Tensor) -> Lent:
        """Choose batch rows."""
        place = None if self.place is None else self.place[index]
        return replace(self, row=self.row[:, index], place=place)

    def places(self) -> Tensor:
        """Return which slot of the blocks each one is, int64 [B, H, S]."""
        if self.place is not None:
            return self.place
        every = torch.arange(len(self.keys) * self.block, device=self.like.device)
        return every.expand(self.row.shape[1], self.like.shape[1], -1)


@final
@dataclass(frozen=True, eq=False)
class InTiers(TensorCodec):
    """Hold a tensor exactly, in blocks that tiers move between device, host memory and files.

    The blocks used last stay on the device, as many as the tiers have room for: the hot blocks of
    ReKV, arXiv 2503.00540, and the values of ShadowKV, arXiv 2410.21465, section 4.1.
    Bytes below the device are not among those of a store; the tiers count them.

    Args:
        tiers: Tiers that hold the blocks; blocks go when nothing refers to them.
        block: Slots of a block.
    """

    tiers: Tiers
    block: Count = 64

    @property
    def multiple(self) -> int:
        """Whole blocks."""
        return self.block

    def encode(self, x: Tensor) -> Lent:
        """Send a tensor `[B, H, S, D]` to the tiers."""
        blocks = [part.clone() for part in checked(x, self.block).split(self.block, 2)]
        lease = Lease(self.tiers, blocks if x.shape[2] else [])
        row = torch.arange(len(x), device=x.device).expand(len(lease.keys), -1)
        like = x.new_empty(0, x.shape[1], 0, x.shape[3])
        return Lent(self.tiers, (lease,), self.block, like, row)

    def join(self, parts: Sequence[Payload]) -> Lent:
        """Append slots; blocks stay where they are."""
        found = all_of(Lent, parts)
        leases = tuple(lease for part in found for lease in part.leases)
        places, first = [], 0
        for part in found:
            places.append(part.places() + first)
            first += len(part.keys) * self.block
        plain = all(part.place is None for part in found)
        row = torch.cat([part.row for part in found])
        place = None if plain else torch.cat(places, 2)
        return replace(found[0], leases=leases, row=row, place=place)

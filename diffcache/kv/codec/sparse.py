"""Few elements of a tensor kept by their place: the largest of a token, or the outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from diffcache.kernels.pack import pack
from diffcache.kv.codec.base import Exact, Parts, Payload, TensorCodec, all_of, appended, checked
from diffcache.kv.codec.table import narrow
from diffcache.kv.settings import Mode, Range, Share

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as floats of so many bytes


@dataclass(frozen=True, eq=False)
class Bitmap(Parts):
    """A bit for every channel of a slot, and the values of those that are set.

    Args:
        bits: `[B, H, S, ceil(D / 8)]` uint8.
        values: Codes `[B, H, S, k]`, the kept channels of a slot in order.
        size: Channels, D.
        dtype: Dtype that was encoded, and is decoded to.
    """

    direct = True
    bits: Tensor
    values: Payload
    size: int
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the kept values in their places and zeros elsewhere."""
        # A byte at a time: where its first value is, and from tables which of the next each bit has
        # and a mask of its bits. Going over the bits one by one takes several times longer.
        values, shape = self.values.decode().to(self.dtype).flatten(), self.bits.shape
        if not len(values):
            return values.new_zeros(*shape[:3], self.size)
        whole = _INTEGERS[values.element_size()]
        byte = torch.arange(256, device=self.bits.device)
        bits = byte[:, None] >> torch.arange(8, device=byte.device) & 1
        number = self.bits.flatten().int()
        counts = bits.sum(1).int().index_select(0, number)
        first = counts.cumsum(0, dtype=torch.int32).sub_(counts).clamp_max_(len(values) - 1)
        place = (bits.cumsum(1) - 1).clamp_min_(0).int().index_select(0, number)
        found = values.index_select(0, place.add_(first[:, None]).flatten())
        found.view(whole).bitwise_and_((-bits).to(whole).index_select(0, number).flatten())
        return found.view(*shape[:3], 8 * shape[3])[..., : self.size]


@dataclass(frozen=True)
class BitmapSparse(TensorCodec):
    """Prune the smallest magnitudes of every token and keep the rest behind a bitmap.

    Reference: Mustafar, arXiv 2505.22913 (per-token magnitude pruning of keys and
    values). Of equal magnitudes the lower channels are kept.

    Args:
        sparsity: Share of a token's channels that is pruned, 0 to below 1; rounded down to whole
            channels.
        inner: Codec of the kept values `[B, H, S, k]`; None keeps them in the dtype that was given.
        mode: `paper` prunes `floor(D * sparsity)` channels; `official` keeps every magnitude that
            is at least the largest of those, as the authors' code does, which prunes one fewer.
    """

    sparsity: Annotated[float, Range(0, 1, below=True)] = 0.7
    inner: TensorCodec | None = None
    mode: Mode = "paper"

    def kept(self, size: int) -> int:
        """Return the channels of a token that are kept, where D is `size`."""
        # 50 * 0.58 is 29 less a rounding error.
        pruned = math.floor(size * self.sparsity + 1e-9)
        return size - max(pruned - (self.mode == "official"), 0)

    def encode(self, x: Tensor) -> Bitmap:
        """Code a tensor `[B, H, S, D]`."""
        size = checked(x, self.multiple).shape[3]
        order = x.abs().argsort(dim=-1, descending=True, stable=True)
        places = order[..., : self.kept(size)].sort(-1).values
        bits = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).scatter_(3, places, 1)
        values = (self.inner or Exact()).encode(x.gather(3, places))
        return Bitmap(pack(bits, 1), values, size, x.dtype)

    def join(self, parts: Sequence[Payload]) -> Bitmap:
        """Append slots."""
        return appended(all_of(Bitmap, parts), values=self.inner or Exact())


@dataclass(frozen=True, eq=False)
class Scattered(Payload):
    """Elements listed slot after slot, of rows and heads in order.

    Args:
        counts: `[B, H, S]`, elements of each slot, a narrow integer.
        channels: `[N]`, the channel of each element, a narrow integer.
        values: `[N]`, in the dtype that was encoded.
        size: Channels, D.
    """

    counts: Tensor
    channels: Tensor
    values: Tensor
    size: int

    def decode(self) -> Tensor:
        """Return the elements in their places and zeros elsewhere."""
        return self.put(self.values.new_zeros(*self.counts.shape, self.size))

    def over(self, x: Tensor) -> Tensor:
        """Return `[B, H, S, D]` with the elements in their places."""
        return self.put(x.clone(memory_format=torch.contiguous_format))

    def put(self, x: Tensor) -> Tensor:
        """Write the elements to their places of a contiguous `[B, H, S, D]`, and return it."""
        x.view(-1, self.size)[self.owners(), self.channels.long()] = self.values.to(x.dtype)
        return x

    def places(self) -> Tensor:
        """Return where the elements are, bool `[B, H, S, D]`."""
        return replace(self, values=torch.ones_like(self.values)).decode().bool()

    def owners(self) -> Tensor:
        """Return the number of the slot of each element, `[N]` int64, over rows and heads."""
        counts = self.counts.flatten().long()
        return torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)

    def select(self, order: Tensor) -> Scattered:
        """Return the slots numbered `order`, `[B, H, n]` int64, over rows and heads."""
        counts = self.counts.flatten().long()
        ends = counts.cumsum(0)
        chosen, wanted = counts[order.flatten()], (ends - counts)[order.flatten()]
        total = torch.arange(int(chosen.sum()), device=order.device)
        first = (chosen.cumsum(0) - chosen).repeat_interleave(chosen)
        places = total - first + wanted.repeat_interleave(chosen)
        return Scattered(self.counts.flatten()[order], self.channels[places], self.values[places], self.size)

    def numbers(self) -> Tensor:
        """Return the number of each slot, `[B, H, S]` int64."""
        every = torch.arange(self.counts.numel(), device=self.counts.device)
        return every.reshape(self.counts.shape)

    def take(self, index: Tensor) -> Scattered:
        """Gather slots."""
        return self.select(self.numbers().gather(2, index))

    def rows(self, index: Tensor) -> Scattered:
        """Gather batch rows."""
        return self.select(self.numbers()[index])


@dataclass(frozen=True)
class Outliers(TensorCodec):
    """Keep the largest and the smallest elements of every vector exactly, and zeros elsewhere.

    Reference: the sparse part of GEAR, arXiv 2403.05527. Elements are listed by slot:
    a value, a channel, and a count for each slot.

    Args:
        share: Share of a vector that is kept, 0 to 1, half of it the largest elements and half the
            smallest; each half is rounded to whole elements, and is at least one above 0.
        along: Axis of a vector: the `channels` of one slot, or the slots (`tokens`) that
            are encoded together of one channel.
    """

    share: Share = 0.02
    along: Literal["tokens", "channels"] = "channels"

    def half(self, length: int) -> int:
        """Return the elements that are kept at either end of a vector of `length`."""
        return min(max(round(self.share / 2 * length), 1), length // 2) if self.share else 0

    def encode(self, x: Tensor) -> Scattered:
        """Code a tensor `[B, H, S, D]`."""
        axis = 3 if checked(x) is not None and self.along == "channels" else 2
        length = x.shape[axis]
        order = x.argsort(dim=axis, stable=True)
        half = self.half(length)
        ends = torch.cat([order.narrow(axis, 0, half), order.narrow(axis, length - half, half)], axis)
        kept = torch.zeros_like(x, dtype=torch.bool).scatter_(axis, ends, True)
        channels = kept.nonzero()[:, 3]
        size = x.shape[3]
        counts = narrow(kept.sum(3), size + 1)
        return Scattered(counts, narrow(channels, size), x[kept], size)

    def join(self, parts: Sequence[Payload]) -> Scattered:
        """Append slots."""
        found = all_of(Scattered, parts)
        batch, heads = found[0].counts.shape[:2]
        starts, numbers = 0, []
        for part in found:
            numbers.append(part.numbers() + starts)
            starts += part.counts.numel()
        flat = Scattered(
            torch.cat([part.counts.flatten() for part in found]),
            torch.cat([part.channels for part in found]),
            torch.cat([part.values for part in found]),
            found[0].size,
        )
        return flat.select(torch.cat(numbers, 2).reshape(batch, heads, -1))

"""Keys of video in 1.x bits: wide channels in two bits, the others as signs of a spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots
from diffcache.kernels.pack import pack, unpack
from diffcache.kv.codec.base import Parts, Payload, TensorCodec, all_of, appended, checked, work_dtype
from diffcache.kv.codec.lowrank import steady_product
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.table import SlotTable, compact, narrow
from diffcache.kv.settings import FloatType, Several, Share


@lru_cache(maxsize=8)
def real_fourier(length: int) -> Tensor:
    """Return the orthonormal real Fourier basis, `[length, length]` float64, waves in rows.

    Row 0 is constant; then the cosine and the sine of every frequency, and last, where `length` is
    even, the fastest cosine. The coefficients of a signal are `real_fourier(length) @ signal`: the
    real and imaginary parts of its discrete Fourier transform, each once.
    """
    time = torch.arange(length, dtype=torch.float64)
    rows = [torch.full((length,), length**-0.5, dtype=torch.float64)]
    for frequency in range(1, (length + 1) // 2):
        angle = 2 * math.pi * frequency / length * time
        rows += [angle.cos() * (2 / length) ** 0.5, angle.sin() * (2 / length) ** 0.5]
    if length % 2 == 0:
        rows.append((math.pi * time).cos().round() * length**-0.5)
    return torch.stack(rows)


@dataclass(frozen=True, eq=False)
class Spectrum(Payload):
    """Groups of tokens as the signs of their spectrum.

    Args:
        signs: `[B, H, T, group - 1, ceil(D / 8)]` uint8, a bit for every channel.
        grid: `[B, H, T, 2, D]`, magnitude of a coefficient and mean of the group.
        at: `[B, H, S]` place of each slot in the T groups, a narrow integer; None while all slots
            of all groups stand in order.
        size: Channels, D.
        dtype: Dtype that was encoded, and is decoded to.
    """

    signs: Tensor
    grid: Tensor
    at: Tensor | None
    size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Tokens of a group."""
        return self.signs.shape[3] + 1

    def decode(self) -> Tensor:
        """Return every group's mean and the waves of its signs."""
        wide = work_dtype(self.dtype)
        signs = unpack(self.signs, 1, self.size).to(wide) * 2 - 1
        waves = real_fourier(self.group)[1:].mT.to(signs.device)
        scale, mean = self.grid.to(wide).unbind(3)
        shape = steady_product(waves, signs, wide)
        every = (shape * scale.unsqueeze(3) + mean.unsqueeze(3)).flatten(2, 3).to(self.dtype)
        return every if self.at is None else gather_slots(every, self.at.long())

    def places(self) -> Tensor:
        """Return the place of each slot in the groups, `[B, H, S]` int64."""
        if self.at is not None:
            return self.at.long()
        batch, heads, count = self.signs.shape[:3]
        every = torch.arange(count * self.group, device=self.signs.device)
        return every.expand(batch, heads, -1)

    def take(self, index: Tensor) -> Spectrum:
        """Note which slots are kept, and drop groups that no head uses."""
        at = self.places().gather(2, index)
        group, slots = self.group, at.shape[2]
        if slots % group == 0:
            runs = at.unflatten(2, (slots // group, group))
            inside = torch.arange(group, device=at.device)
            if bool((runs == runs[..., :1] // group * group + inside).all()):
                return self.groups(runs[..., 0] // group, None)
        order, rank = compact(at // group, self.signs.shape[2])
        return self.groups(order, narrow(rank * group + at % group, order.shape[2] * group))

    def groups(self, index: Tensor, at: Tensor | None) -> Spectrum:
        """Return the groups at `index`, `[B, H, n]` int64, with slots at `at` in them."""
        signs, grid = gather_slots(self.signs, index), gather_slots(self.grid, index)
        return replace(self, signs=signs, grid=grid, at=at)

    def rows(self, index: Tensor) -> Spectrum:
        """Gather batch rows."""
        at = None if self.at is None else self.at[index]
        return replace(self, signs=self.signs[index], grid=self.grid[index], at=at)


@dataclass(frozen=True)
class FourierSigns(TensorCodec):
    """Keep the sign of every Fourier coefficient of a group of tokens: one bit an element.

    Reference: the 1-bit code of VidKV's normal key channels, arXiv 2503.16257, section 4.2.
    Departures: the first coefficient, the mean of the group, is kept in place of a minimum, and
    the scale is the mean magnitude of the other coefficients, with which one bit loses least.

    Args:
        group: Tokens of a group, at least 2, coded together in every channel.
        scale_dtype: Dtype that mean and magnitude are stored in.
    """

    group: Several = 32
    scale_dtype: FloatType = torch.float16

    @property
    def multiple(self) -> int:
        """The group."""
        return self.group

    def encode(self, x: Tensor) -> Spectrum:
        """Code a tensor `[B, H, S, D]`."""
        size, slots = checked(x, self.multiple).shape[3], x.shape[2]
        groups = x.to(work_dtype(x.dtype)).unflatten(2, (slots // self.group, self.group))
        waves = real_fourier(self.group)[1:].to(groups)
        spectrum = waves @ groups
        limit = torch.finfo(self.scale_dtype).max
        grid = torch.stack([spectrum.abs().mean(3), groups.mean(3)], 3)
        grid = grid.clamp(-limit, limit).to(self.scale_dtype)
        return Spectrum(pack((spectrum >= 0).to(torch.uint8), 1), grid, None, size, x.dtype)

    def join(self, parts: Sequence[Payload]) -> Spectrum:
        """Append groups and slots."""
        found = all_of(Spectrum, parts)
        signs = torch.cat([part.signs for part in found], 2)
        grid = torch.cat([part.grid for part in found], 2)
        at = None
        if any(part.at is not None for part in found):
            start, places = 0, []
            for part in found:
                places.append(part.places() + start)
                start += part.signs.shape[2] * part.group
            at = narrow(torch.cat(places, 2), start)
        return replace(found[0], signs=signs, grid=grid, at=at)


@dataclass(frozen=True, eq=False)
class SplitChannels(Parts):
    """Two groups of channels held apart, and their places, `[B, H, T, D]`, the wide ones first."""

    wide: Payload | None
    rest: Payload | None
    order: SlotTable

    def decode(self) -> Tensor:
        """Put every channel back in its place."""
        both = [part.decode() for part in (self.wide, self.rest) if part is not None]
        sorted_ = torch.cat(both, 3)
        return torch.empty_like(sorted_).scatter_(3, self.order.lookup().long(), sorted_)


TWO_BITS = GroupQuant(2, "tokens", 32)
ONE_BIT = FourierSigns(32)


@dataclass(frozen=True)
class RangeSplit(TensorCodec):
    """Code the channels of the widest range one way and the others another.

    Reference: the mixed-precision keys of VidKV, arXiv 2503.16257, section 4.2: anomalous channels,
    those of the largest `max - min` over the tokens, in two bits, and the others in one bit of
    their spectrum; half of the channels each is the paper's 1.5 bits.

    Args:
        share: Share of the channels of a head that `wide` codes, 0 to 1, rounded.
        wide: Codec of the channels of the widest range.
        rest: Codec of the other channels.
    """

    share: Share = 0.5
    wide: TensorCodec = TWO_BITS
    rest: TensorCodec = ONE_BIT

    @property
    def multiple(self) -> int:
        """The least number of slots that both codecs take."""
        return math.lcm(self.wide.multiple, self.rest.multiple)

    def encode(self, x: Tensor) -> SplitChannels:
        """Code a tensor `[B, H, S, D]`."""
        batch, heads, slots, size = checked(x, self.multiple).shape
        spread = x.new_zeros(batch, heads, size)
        if slots:
            spread = x.amax(2) - x.amin(2)
        order = spread.argsort(dim=-1, descending=True, stable=True)
        sorted_ = x.gather(3, order.unsqueeze(2).expand(-1, -1, slots, -1))
        count = round(self.share * size)
        return SplitChannels(
            self.wide.encode(sorted_[..., :count]) if count else None,
            self.rest.encode(sorted_[..., count:]) if count < size else None,
            SlotTable.single(narrow(order, size), slots),
        )

    def join(self, parts: Sequence[Payload]) -> SplitChannels:
        """Append slots; each keeps the split it was encoded with."""
        return appended(all_of(SplitChannels, parts), wide=self.wide, rest=self.rest)

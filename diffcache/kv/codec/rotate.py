"""Orthogonal changes of the channels before another codec: Hadamard rotation, reordering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.codec.base import Parts, Payload, TensorCodec, all_of, appended, checked, work_dtype
from diffcache.kv.codec.joined_heads import JoinHeads
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.table import SlotTable, joined_slots, narrow
from diffcache.kv.settings import Count, Mode

_TILE = 1 << 16  # numbers that are rotated at a time, so that they stay in a cache of the CPU


def hadamard(x: Tensor, block: int) -> Tensor:
    """Rotate blocks of the last axis by the orthonormal Hadamard matrix, its own inverse.

    Written as sums and differences of pairs: a vector's result does not depend, to the last bit,
    on which others are rotated with it.

    Args:
        x: `[..., N]`, float32 or float64.
        block: Power of two that divides N.
    """
    size = x.shape[-1]
    vectors = x.reshape(-1, size)
    out = torch.empty_like(vectors)
    step = max(len(vectors), 1) if x.device.type != "cpu" else max(_TILE // size, 1)
    for some, turned in zip(vectors.split(step), out.split(step), strict=True):
        # Channels first: sums then run over whole rows of vectors, and not over pairs of numbers.
        now, half = some.t().contiguous(), 1
        other = torch.empty_like(now)
        while half < block:
            left, right = now.view(size // (2 * half), 2, half, -1).unbind(1)
            sums = other.view(size // (2 * half), 2, half, -1)
            torch.add(left, right, out=sums[:, 0])
            torch.sub(left, right, out=sums[:, 1])
            now, other = other, now
            half *= 2
        turned.copy_(now.t()).mul_(block**-0.5)
    return out.view(x.shape)


@dataclass(frozen=True, eq=False)
class Rotated(Parts):
    """Codes of a tensor whose channels were rotated in blocks."""

    direct = True
    inner: Payload
    block: int
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Rotate back."""
        return hadamard(self.inner.decode().to(work_dtype(self.dtype)), self.block).to(self.dtype)

    def near(self) -> Tensor:
        """Rotate back by a product with the matrix."""
        x = self.inner.near().to(work_dtype(self.dtype))
        return (x @ self.matrix(x)).to(self.dtype)

    def matrix(self, like: Tensor) -> Tensor:
        """Return the rotation, `[D, D]`, its own inverse."""
        return hadamard(torch.eye(like.shape[3], dtype=like.dtype, device=like.device), self.block)


@dataclass(frozen=True)
class Hadamard(TensorCodec):
    """Rotate the channels by a Hadamard matrix, which spreads outliers, then code.

    Reference: QuaRot, arXiv 2404.00456; over grouped heads in RotateKV, arXiv
    2501.16383. Where the number of channels is no power of two, blocks of its largest
    factor that is one are rotated.

    Args:
        inner: Codec of the rotated tensor, in float32.
        heads: Consecutive heads that are rotated together, which must divide H.
        block: Channels of a rotated block, a power of two that divides `heads * D`; None for the
            largest.
    """

    inner: TensorCodec
    heads: Count = 1
    block: int | None = None

    def check(self) -> None:
        """Raise ValueError if `heads` or `block` is out of its range."""
        if self.block is not None and (self.block < 2 or self.block & (self.block - 1)):
            raise ValueError(f"block={self.block}: must be a power of two, or None")

    def encode(self, x: Tensor) -> Payload:
        """Code a tensor `[B, H, S, D]`; raise ValueError if no block of two channels or more divides D."""
        size = checked(x, self.multiple).shape[3] * self.heads
        if self.block_of(size) < 2:
            raise ValueError(
                f"no Hadamard block divides {size} channels (heads={self.heads},"
                f" block={self.block}): their number must be even and a multiple of block"
            )
        if self.heads > 1:
            return self._across().encode(x)
        block = self.block_of(size)
        rotated = hadamard(x.to(work_dtype(x.dtype)), block)
        return Rotated(self.inner.encode(rotated), block, x.dtype)

    def join(self, parts: Sequence[Payload]) -> Payload:
        """Append slots."""
        if self.heads > 1:
            return self._across().join(parts)
        return appended(all_of(Rotated, parts), inner=self.inner)

    def block_of(self, size: int) -> int:
        """Return the channels of a block where there are `size` channels, 0 if there is none."""
        if self.block is None:
            return size & -size
        return 0 if size % self.block else self.block

    def _across(self) -> JoinHeads:
        return JoinHeads(replace(self, heads=1), self.heads)


@dataclass(frozen=True, eq=False)
class Permuted(Parts):
    """Codes of reordered channels, and the order, `[B, H, T, D]`."""

    direct = True
    inner: Payload
    order: SlotTable

    def decode(self) -> Tensor:
        """Put every channel back in its place."""
        sorted_ = self.inner.decode()
        order = replace(self.order, values=self.order.values.long()).lookup()
        return torch.empty_like(sorted_).scatter_(3, order, sorted_)

    def near(self) -> Tensor:
        """Rotate back and put channels in their places by one product for each order."""
        inner, runs = self.inner, self.order.runs
        if not isinstance(inner, Rotated) or runs is None:
            return self.decode()
        x = inner.inner.near().to(work_dtype(inner.dtype))
        turn, parts = inner.matrix(x), []
        for run in runs:
            order = self.order.values[:, :, run.row : run.row + run.rows, None].long()
            order = order.expand(*order.shape[:3], *turn.shape)
            placed = torch.empty_like(order, dtype=x.dtype).scatter_(4, order, turn.expand_as(order))
            some = x[:, :, run.first : run.stop].unflatten(2, (run.rows, run.each))
            parts.append(some @ placed)
        return joined_slots(parts).to(inner.dtype)


@dataclass(frozen=True, eq=False)
class ChannelPermute(TensorCodec):
    """Reorder the channels so that those of similar energy stand together, then code.

    Reference: the outlier-aware reordering of RotateKV, arXiv 2501.16383. The paper
    fits one order a layer on calibration text: that is a fixed `order`. Without one it is fitted
    to every tensor that is encoded, and stored with it.

    Args:
        inner: Codec of the reordered tensor.
        order: `[D]` or `[H, D]`, channels in their new order, as `energy_order` returns them for
            a batch of one; None to fit.
    """

    inner: TensorCodec
    order: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError if the order is no permutation."""
        if self.order is None:
            return
        places = torch.arange(self.order.shape[-1], device=self.order.device)
        if self.order.dim() > 2 or not bool((self.order.long().sort(-1).values == places).all()):
            raise ValueError("order must be [D] or [H, D], a permutation of the channels in a row")

    def encode(self, x: Tensor) -> Permuted:
        """Code a tensor `[B, H, S, D]`; raise ValueError if the order is of other channels or heads."""
        batch, heads, slots, size = checked(x, self.multiple).shape
        if self.order is None:
            order = energy_order(x)
        elif self.order.shape[-1] != size or self.order.shape[:-1] not in ((), (heads,)):
            raise ValueError(f"order has shape {list(self.order.shape)}: x has {heads} heads, {size} channels")
        else:
            order = self.order.long().to(x.device).expand(batch, heads, size)
        sorted_ = x.gather(3, order.unsqueeze(2).expand(-1, -1, slots, -1))
        table = SlotTable.single(narrow(order, size), slots)
        return Permuted(self.inner.encode(sorted_), table)

    def join(self, parts: Sequence[Payload]) -> Permuted:
        """Append slots."""
        return appended(all_of(Permuted, parts), inner=self.inner)


def energy_order(x: Tensor) -> Tensor:
    """Return the channels by falling energy, the sum of squares over the slots.

    Args:
        x: `[B, H, S, D]`.

    Returns:
        `[B, H, D]` int64; channels of equal energy keep their order.
    """
    energy = x.to(work_dtype(x.dtype)).square().sum(2)
    return energy.argsort(dim=-1, descending=True, stable=True)


def rotatekv(
    bits: float = 2, group: int = 32, heads: int = 1, order: Tensor | None = None, mode: Mode = "paper"
) -> TensorCodec:
    """Return the key codec of RotateKV: reorder, rotate over grouped heads, quantize per token.

    It is meant for keys before their rotary embedding.

    Args:
        bits: Bits of a code, see `GroupQuant`.
        group: Channels of a quantization group.
        heads: Consecutive heads that are reordered and rotated together, which must divide H.
        order: Calibrated order of the `heads * D` channels; None fits it to each block.
        mode: `"paper"` or `"official"`, see `rotatekv_grid`.

    Raises:
        ValueError: If a value is out of its range.

    Reference: RotateKV, arXiv 2501.16383.
    """
    one = ChannelPermute(Hadamard(rotatekv_grid(bits, group, mode)), order)
    return JoinHeads(one, heads) if heads > 1 else one


def rotatekv_grid(bits: float = 2, group: int = 32, mode: Mode = "paper") -> GroupQuant:
    """Return what quantizes the tokens of RotateKV, keys once they are rotated and values.

    Args:
        bits: Bits of a code, see `GroupQuant`.
        group: Channels of a quantization group.
        mode: `paper` divides the range by `2 ** bits - 1`; `official` by the bits' square less
            one, as the authors' code does, which at 3 bits is 8 and leaves the top code short, and
            has 0 stand a whole number of scales from the smallest value.

    Raises:
        ValueError: If a value is out of its range.
    """
    if mode not in ("paper", "official"):
        raise ValueError(f"mode={mode!r}: must be 'paper' or 'official'")
    if mode == "paper":
        return GroupQuant(bits, "channels", group)
    if bits not in (2, 3, 4):
        raise ValueError(f"bits={bits!r}: mode='official' has 2, 3 or 4; use mode='paper'")
    return GroupQuant(bits, "channels", group, levels=int(bits) ** 2, whole_zero=True)

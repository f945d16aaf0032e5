"""Codecs that scale channels before another codec and scale them back after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.codec.base import Parts, Payload, TensorCodec, all_of, appended, checked, work_dtype
from diffcache.kv.codec.table import SlotTable
from diffcache.kv.settings import FloatType


@dataclass(frozen=True, eq=False)
class Scaled(Parts):
    """Codes of scaled channels, and the factor `[B, H, T, D]` that these are times."""

    inner: Payload
    factor: SlotTable
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the inner tensor times the factor of each channel."""
        wide = work_dtype(self.dtype)
        return (self.inner.decode().to(wide) * self.factor.lookup().to(wide)).to(self.dtype)


def encode_scaled(inner: TensorCodec, x: Tensor, factor: Tensor) -> Scaled:
    """Code `x / factor`, where `factor` is `[B, H, D]` as it is stored."""
    wide = x.to(work_dtype(x.dtype))
    coded = inner.encode(wide / factor.to(wide.dtype).unsqueeze(2))
    return Scaled(coded, SlotTable.single(factor, x.shape[2]), x.dtype)


@dataclass(frozen=True)
class ChannelSeparable(TensorCodec):
    """Divide every channel by the square root of its largest magnitude, then code.

    Reference: ZipCache, arXiv 2405.14256 (channel-separable tokenwise quantization);
    the inner codec there is `GroupQuant(bits, "channels", group=None)`. The factors are those of
    the slots that are encoded together and are rounded to `scale_dtype` before they divide.

    Args:
        inner: Codec of the scaled tensor.
        scale_dtype: Dtype that the factors are stored in.
    """

    inner: TensorCodec
    scale_dtype: FloatType = torch.float16

    def encode(self, x: Tensor) -> Scaled:
        """Code a tensor `[B, H, S, D]`."""
        checked(x, self.multiple)
        batch, heads, slots, size = x.shape
        wide = x.to(work_dtype(x.dtype))
        largest = wide.abs().amax(2) if slots else wide.new_zeros(batch, heads, size)
        limit = torch.finfo(self.scale_dtype).max
        factor = largest.sqrt().clamp(max=limit).to(self.scale_dtype)
        return encode_scaled(self.inner, x, torch.where(factor > 0, factor, 1))

    def join(self, parts: Sequence[Payload]) -> Scaled:
        """Append slots."""
        return appended(all_of(Scaled, parts), inner=self.inner)


@dataclass(frozen=True, eq=False)
class Balanced(TensorCodec):
    """Multiply every channel by a given factor, then code; decoding divides by it.

    Reference: the channel balancer of MiKV, arXiv 2402.18096. The paper multiplies
    keys, and divides queries, by `balancer(q, k)`; dividing the decoded keys instead leaves the
    queries alone and gives the same logits.

    Args:
        inner: Codec of the scaled tensor.
        factor: `[D]`, `[H, D]` or `[B, H, D]`, above 0; broadcasts with `[B, H, D]`.
    """

    inner: TensorCodec
    factor: Tensor

    def check(self) -> None:
        """Raise ValueError if the factor is not above 0 and finite, or has another shape."""
        if not 1 <= self.factor.dim() <= 3:
            raise ValueError(f"factor has shape {list(self.factor.shape)}: give up to [B, H, D]")
        if not bool(((self.factor > 0) & self.factor.isfinite()).all()):
            raise ValueError("factor has values that are not above 0 and finite")

    def encode(self, x: Tensor) -> Scaled:
        """Code a tensor `[B, H, S, D]`; raise ValueError if the factor does not broadcast with it."""
        batch, heads, _, size = checked(x, self.multiple).shape
        wanted = (batch, heads, size)
        given = (1,) * (3 - self.factor.dim()) + tuple(self.factor.shape)
        if any(a not in (1, b) for a, b in zip(given, wanted, strict=True)):
            raise ValueError(f"factor has shape {list(self.factor.shape)}: x needs {list(wanted)}")
        return encode_scaled(self.inner, x, (1 / self.factor).to(x.device).expand(wanted))

    def join(self, parts: Sequence[Payload]) -> Scaled:
        """Append slots."""
        return appended(all_of(Scaled, parts), inner=self.inner)


def balancer(q: Tensor, k: Tensor) -> Tensor:
    """Return MiKV's factor of each key channel, `sqrt(max |q| / max |k|)`.

    Args:
        q: `[B, H, G, n, D]`, queries of each key head.
        k: `[B, H, S, D]`, keys.

    Returns:
        `[B, H, D]` float32 (float64 for float64); 1 where a channel of either is all zeros.
    """
    wide = work_dtype(k.dtype)
    top, bottom = q.to(wide).abs().amax((2, 3)), k.to(wide).abs().amax(2)
    return torch.where((top > 0) & (bottom > 0), (top / bottom).sqrt(), 1.0)

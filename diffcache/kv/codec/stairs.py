"""Rungs of ladders: codes that lose bits by a shift, and keys balanced against their queries."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diffcache.kernels.pack import pack, unpack
from diffcache.kv.codec.base import Payload
from diffcache.kv.codec.held import KVCodec, Pair
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.codec.scaled import ChannelSeparable, Scaled, balancer, encode_scaled
from diffcache.kv.codec.tails import filled_up, without_gaps
from diffcache.kv.observe import Observation
from diffcache.kv.segment import Coded, Segment
from diffcache.kv.slots import Slots

_POWERS = (1, 2, 4, 8)


def shifted(payload: Quantized, bits: int) -> Quantized:
    """Return codes without their lowest bits, each standing for the middle of what it stood for.

    No element is decoded: codes are shifted right, and a group's scale and minimum follow. One
    shift after another gives the codes that one shift over both gives.

    Args:
        payload: Codes of an asymmetric `GroupQuant` without `levels`.
        bits: Bits of a code afterwards, at most as many as `payload` has: 1, 2, 4 or 8.

    Reference: the equivalent right shift of PM-KVQ, arXiv 2505.18610, which rounds where this takes
    the middle.
    """
    drop = int(payload.codec.bits) - bits
    if not drop:
        return payload
    codes = unpack(payload.codes, payload.codec.bits, payload.size) >> drop
    old = payload.grid.values.double()
    scale, low = old.unbind(3)
    found = torch.stack([scale * 2**drop, low + scale * ((2**drop - 1) / 2)], 3)
    limit = torch.finfo(payload.codec.scale_dtype).max
    grid = replace(payload.grid, values=found.clamp(-limit, limit).to(payload.grid.values.dtype))
    return replace(payload, codes=pack(codes, bits), grid=grid, codec=replace(payload.codec, bits=bits))


@dataclass(frozen=True)
class Stair(KVCodec):
    """A rung that slots come to from the rung above by a shift of their codes.

    Slots that come to it exact are coded in `first` bits and shifted, so that they end in the same
    codes as if they had come down rung by rung.

    Reference: the equivalent right shift of PM-KVQ, arXiv 2505.18610.

    Args:
        bits: Bits of a code of this rung.
        group: Tokens of a group of keys, channels of a group of values.
        first: Bits of the first rung.
    """

    bits: int = 4
    group: int = 32
    first: int = 8

    def check(self) -> None:
        """Raise ValueError if bits are not 1, 2, 4 or 8, or more than the first rung has."""
        if self.bits not in _POWERS or self.first not in _POWERS or self.bits > self.first:
            raise ValueError(f"bits={self.bits}, first={self.first}: must be of 1, 2, 4 and 8, and bits at most first")

    def hold(self, slots: Slots, level: int) -> Segment:
        """Return slots coded in `first` bits and shifted."""
        return self._down(self._pair.hold(slots, level))

    def joined(self, first: Segment, second: Segment) -> Segment | None:
        """Return two segments of this rung as one."""
        return self._pair.joined(first, second)

    def converted(self, segment: Segment, index: Tensor, keep: Tensor, level: int) -> Segment | None:
        """Return slots of a rung above, their codes shifted."""
        if not isinstance(segment, Coded) or segment.exact is not None:
            return None
        parts = (segment.k, segment.v)
        if not all(isinstance(p, Quantized) and p.codec.bits >= self.bits for p in parts):
            return None
        return replace(self._down(segment.take(index, keep)), level=level)

    @property
    def _pair(self) -> Pair:
        keys = GroupQuant(self.first, "tokens", self.group)
        return Pair(keys, GroupQuant(self.first, "channels", self.group), self.group)

    def _down(self, segment: Coded) -> Coded:
        k, v = (self._shifted(part) for part in (segment.k, segment.v))
        return replace(segment, k=k, v=v)

    def _shifted(self, payload: Payload) -> Payload:
        assert isinstance(payload, Quantized)
        return shifted(payload, self.bits)


@dataclass(frozen=True)
class BalancedRung(KVCodec):
    """A rung whose keys are scaled, channel by channel, by how large the queries are there.

    The factors are found when the first slots come and stay, so that they are stored once.

    Args:
        pair: Codecs of the scaled keys, and of the values.

    Reference: MiKV, arXiv 2402.18096. Departure: the largest query of a channel is
    that of the queries that the recipe's score keeps, not of the whole prompt.
    """

    pair: Pair = field(default_factory=lambda: Pair(GroupQuant(2, "channels", 32), GroupQuant(2, "channels", 32)))

    def hold(self, slots: Slots, level: int) -> Segment:
        """Return slots coded without factors."""
        return self.pair.hold(slots, level)

    def hold_beside(self, slots: Slots, level: int, seen: Observation, old: Segment | None) -> Segment:
        """Return slots coded with the factors of those that are held, or new ones."""
        slots = without_gaps(filled_up(slots, self.pair.multiple))
        if isinstance(old, Coded) and isinstance(old.k, Scaled) and old.k.factor.values.shape[2]:
            factor = old.k.factor.values[:, :, 0]
        else:
            factor = 1 / self._balancer(seen).to(torch.float16)
        keys = encode_scaled(self.pair.keys, slots.k, factor.to(torch.float16))
        return replace(self.pair.hold(slots, level), k=keys)

    def joined(self, first: Segment, second: Segment) -> Segment | None:
        """Return two segments of this rung as one."""
        pair = replace(self.pair, keys=ChannelSeparable(self.pair.keys))  # joins what is scaled
        return pair.joined(first, second)

    def _balancer(self, seen: Observation) -> Tensor:
        asked = seen.asked
        q = asked.grouped(seen.slots.k.shape[1]) * seen.query_valid[:, None, None, :, None]
        return balancer(q, seen.slots.k * seen.valid[..., None])

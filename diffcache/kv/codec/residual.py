"""Quantize, and keep what that loses: outliers apart, and a low rank of the error (GEAR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.codec.base import Exact, Parts, Payload, TensorCodec, all_of, appended, checked, work_dtype
from diffcache.kv.codec.lowrank import Factors, LowRank
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.codec.sparse import Outliers, Scattered
from diffcache.kv.codec.table import SlotTable
from diffcache.kv.settings import Bits, Count, Share, Whole


@dataclass(frozen=True, eq=False)
class Geared(Parts):
    """Quantized elements, outliers in place of some, plus a low rank; the last two may be none."""

    direct = True
    quantized: Quantized
    factors: Factors | None
    outliers: Scattered | None
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the sum, computed in float32 (float64 for float64)."""
        total = self._coarse()
        if self.factors is not None:
            total += self.factors.decode()
        return total.to(self.dtype)

    def dot(self, q: Tensor) -> Tensor:
        """Return the products of queries with all slots, those with the low rank apart."""
        found = q @ self._coarse().to(q.dtype).mT
        return found if self.factors is None else found + self.factors.dot(q)

    def mix(self, weights: Tensor) -> Tensor:
        """Return sums of all slots by weights, those of the low rank apart."""
        found = weights @ self._coarse().to(weights.dtype)
        return found if self.factors is None else found + self.factors.mix(weights)

    def _coarse(self) -> Tensor:
        """Return quantized elements with outliers in place of some."""
        total = self.quantized.decode()  # nobody else's, so that the rest is added in place
        return total if self.outliers is None else self.outliers.put(total)


@dataclass(frozen=True)
class Gear(TensorCodec):
    """Quantize what is left without outliers, and add a low rank of the error.

    Outliers are quantized as the mean of their vector, as in the official code: zeros, which
    subtracting them leaves, would widen the range of vectors that lie away from 0. They are kept
    exactly and take the place of what was quantized before the error is taken.

    Reference: GEAR, arXiv 2403.05527, with `along="tokens"` for keys and `"channels"`
    for values. The low rank is of each head, from a power iteration that starts from seeded normal
    numbers; the first vectors of a higher rank span what a lower one spans, so the error never
    grows with the rank. Departures: a vector that outliers are taken from is of one head, and
    over tokens ends where the encoded block ends; both kinds give the same share of a vector, where
    the official code takes as many outliers of a channel as of a token.

    Args:
        bits: Bits of a code, see `GroupQuant`.
        along: Axis that a group and a vector of outliers run over: `tokens` or `channels`.
        group: Elements of a group, see `GroupQuant`.
        outliers: Share of a vector that is kept apart; 0 for none. See `Outliers`.
        rank: Vectors of the low rank; 0 for none.
        iterations: Rounds of the power iteration, at least 1.
        seed: Seed of the numbers that the power iteration starts from.
    """

    bits: Bits = 2
    along: Literal["tokens", "channels"] = "channels"
    group: Count | None = 32
    outliers: Share = 0.02
    rank: Whole = 4
    iterations: Count = 2
    seed: int = 0

    @property
    def multiple(self) -> int:
        """The group where it runs along tokens, else 1."""
        return self.quant.multiple

    @property
    def quant(self) -> GroupQuant:
        """Codec that quantizes."""
        return GroupQuant(self.bits, self.along, self.group)

    @property
    def sparse(self) -> Outliers:
        """Codec that keeps the outliers."""
        return Outliers(self.outliers, self.along)

    def encode(self, x: Tensor) -> Geared:
        """Code a tensor `[B, H, S, D]`."""
        wide = checked(x, self.multiple).to(work_dtype(x.dtype))
        outliers, rest = None, wide
        if self.outliers:
            outliers = self.sparse.encode(x)
            mean = wide.mean(3 if self.along == "channels" else 2, keepdim=True)
            rest = mean.expand_as(wide).where(outliers.places(), wide)
        quantized = self.quant.encode(rest)
        factors = None
        if self.rank:
            found = quantized.decode()
            error = wide - (found if outliers is None else outliers.over(found))
            left, basis = self.low_rank(error)
            stored = Exact(x.dtype).encode(left)
            table = SlotTable.single(basis.to(x.dtype).contiguous(), x.shape[2])
            factors = Factors(stored, table, wide.dtype)
        return Geared(quantized, factors, outliers, x.dtype)

    def low_rank(self, error: Tensor) -> tuple[Tensor, Tensor]:
        """Return coordinates `[B, H, S, r]` and basis `[B, H, r, D]` of the error `[B, H, S, D]`.

        Their product is the error projected onto `r` directions over the slots.
        """
        slots, size = error.shape[2:]
        rank = min(self.rank, size)
        seeded = torch.Generator().manual_seed(self.seed)
        # Drawn one by one: the numbers of a vector then do not depend on how many there are.
        start = torch.stack([torch.randn(size, generator=seeded) for _ in range(rank)], 1)
        right = start.to(error).expand(*error.shape[:2], size, rank)
        left = error.new_zeros(*error.shape[:3], rank)
        few = min(rank, slots)  # of fewer slots than vectors the rest stay zero
        for _ in range(self.iterations):
            left[..., :few] = torch.linalg.qr(error @ right).Q[..., :few]
            right = torch.linalg.qr(error.mT @ left).Q
        return left, left.mT @ error

    def join(self, parts: Sequence[Payload]) -> Geared:
        """Append slots of every part."""
        # Factors are joined as they are, whatever the rank of the codec that joins them.
        return appended(all_of(Geared, parts), quantized=self.quant, factors=LowRank(1), outliers=self.sparse)

"""Integer codes, a basis over tokens or directions that neighboring layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.codec.base import Exact, Parts, Payload, TensorCodec, all_of, appended, checked, sharing, work_dtype
from diffcache.kv.codec.joined_heads import JoinedHeads, JoinHeads
from diffcache.kv.codec.joined_layers import LayersCodec
from diffcache.kv.codec.lowrank import Factors, LowRank
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.table import SlotTable, narrow
from diffcache.kv.settings import Mode, Share, Size


@dataclass(frozen=True)
class SharedCodes(LayersCodec):
    """Quantize the first layer; the others use its codes with scales and minima of their own.

    Reference: XQuant, arXiv 2510.11236 (cross-layer compression).

    Args:
        inner: Quantizes, of every layer the grid and of the first the codes.
    """

    inner: GroupQuant

    def encode(self, xs: Sequence[Tensor]) -> list[Payload]:
        """Code the layers."""
        own = [self.inner.encode(x) for x in xs]
        return [replace(each, codes=own[0].codes) for each in own]

    def join(self, layers: Sequence[Sequence[Payload]]) -> list[Payload]:
        """Append, and share the codes that are the same."""
        return [*sharing([self.inner.join(parts) for parts in layers], "codes")]


@dataclass(frozen=True)
class SharedBasis(LayersCodec):
    """Factor all layers and heads of a slot side by side: shared coordinates, a basis of each.

    Reference: xKV, arXiv 2503.18893, section 4: one truncated SVD of the keys (before rotation)
    or values of a group of layers, over the tokens of a prompt. Numbers are stored in the dtype
    that was given. A block should hold several times as many slots as `rank`: it has a basis
    of its own, and fewer slots are stored as if there were as many.

    Args:
        rank: Coordinates of a slot, or a share of the channels of all layers and heads together.
    """

    rank: Size = 0.25

    def encode(self, xs: Sequence[Tensor]) -> list[Payload]:
        """Code the layers."""
        batch, heads, slots, _ = checked(xs[0]).shape
        wide = [checked(x).transpose(1, 2).flatten(2)[:, None] for x in xs]
        joint = torch.cat(wide, 3).double()
        left, basis = self._factors(joint)
        stored = Exact().encode(left.to(xs[0].dtype).contiguous())
        parts = basis.to(xs[0].dtype).split([x.shape[3] for x in wide], 3)
        shape = (batch, 1, slots)
        return [
            JoinedHeads(Factors(stored, SlotTable.single(part.contiguous(), slots), x.dtype), heads, shape)
            for part, x in zip(parts, xs, strict=True)
        ]

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return coordinates [B, 1, S, r] and basis [B, 1, r, N] of x, float64 [B, 1, S, N]."""
        slots, size = x.shape[2:]
        rank = max(round(self.rank * size), 1) if isinstance(self.rank, float) else self.rank
        rank, most = min(rank, slots, size), min(rank, size)
        tall = slots > size
        gram = x.mT @ x if tall else x @ x.mT
        vectors = torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1)
        left, right = (x @ vectors, vectors.mT) if tall else (vectors, vectors.mT @ x)
        if rank < most:  # blocks of all sizes are appended to one another
            left = functional.pad(left, (0, most - rank))
            right = functional.pad(right, (0, 0, 0, most - rank))
        return left, right

    def join(self, layers: Sequence[Sequence[Payload]]) -> list[Payload]:
        """Append, and share the coordinates that are the same."""
        joined = [JoinHeads(LowRank(1)).join(parts) for parts in layers]
        factors = sharing(all_of(Factors, [each.inner for each in joined]), "left")
        return [replace(each, inner=inner) for each, inner in zip(joined, factors, strict=True)]


@dataclass(frozen=True, eq=False)
class Directed(Parts):
    """Directions that layers share, and magnitudes; slots of magnitude 0 have a row of their own.

    Args:
        direction: [B, H, S, D] unit vectors when decoded.
        norm: [B, H, S].
        kept: Rows [B, H, T, D] that are added, zero for slots that are merged.
        dtype: Dtype that was encoded, and is decoded to.
    """

    direction: Payload
    norm: Tensor
    kept: SlotTable
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return direction times magnitude, or the slot's own row."""
        wide = work_dtype(self.dtype)
        merged = self.direction.decode().to(wide) * self.norm.to(wide)[..., None]
        return (merged + self.kept.lookup().to(wide)).to(self.dtype)


@dataclass(frozen=True)
class SharedDirection(LayersCodec):
    """Have two layers share the direction of every vector, and keep a magnitude of each.

    Reference: MiniCache, arXiv 2405.14366: directions are interpolated on the sphere,
    and the tokens whose directions differ most are kept as they are in both layers.

    Args:
        t: Place of the direction between the layers, from 0 (the first's) to 1 (the second's).
        keep: Share of the slots that are not merged, 0 to 1.
        inner: Codec of the directions; None keeps them in the dtype that was given.
        mode: `paper` keeps the `keep` slots of the largest angle in each head; `official` keeps
            those whose angle is below `min + keep * (max - min)`, the most alike, as the condition
            reads in code that goes with later papers.
    """

    t: Share = 0.6
    keep: Share = 0.05
    inner: TensorCodec | None = None
    mode: Mode = "paper"

    def encode(self, xs: Sequence[Tensor]) -> list[Payload]:
        """Code two layers, or one alone, whose direction is its own; raise ValueError if there are more."""
        if len(xs) > 2:
            raise ValueError(f"{len(xs)} layers: two can share a direction; use scope=2")
        wide = [checked(x, self.multiple).to(work_dtype(x.dtype)) for x in xs]
        norms = [x.norm(dim=-1) for x in wide]
        least = torch.finfo(wide[0].dtype).tiny
        units = [x / n.clamp_min(least)[..., None] for x, n in zip(wide, norms, strict=True)]
        angle = (units[0] * units[-1]).sum(-1).clamp(-1, 1).acos()
        middle = slerp(units[0], units[-1], angle, self.t) if len(xs) > 1 else units[0]
        direction = (self.inner or Exact()).encode(middle.to(xs[0].dtype))
        kept = self.retained(angle) if len(xs) > 1 else torch.zeros_like(angle, dtype=torch.bool)
        return [
            Directed(direction, n.masked_fill(kept, 0).to(x.dtype), _rows_of(x, kept), x.dtype)
            for x, n in zip(xs, norms, strict=True)
        ]

    def retained(self, angle: Tensor) -> Tensor:
        """Return which slots are not merged, bool [B, H, S], from angles in radians."""
        if not angle.shape[-1]:
            return torch.zeros_like(angle, dtype=torch.bool)
        if self.mode == "official":
            low, high = angle.amin(-1, keepdim=True), angle.amax(-1, keepdim=True)
            return angle < low + (high - low) * self.keep
        count = round(self.keep * angle.shape[-1])
        order = angle.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return torch.zeros_like(angle, dtype=torch.bool).scatter_(-1, order, True)

    def join(self, layers: Sequence[Sequence[Payload]]) -> list[Payload]:
        """Append, and share the directions that are the same."""
        inner = self.inner or Exact()
        return [*sharing([appended(all_of(Directed, parts), direction=inner) for parts in layers], "direction")]


def slerp(first: Tensor, second: Tensor, angle: Tensor, t: float) -> Tensor:
    """Interpolate unit vectors on the sphere.

    Args:
        first: [..., D].
        second: [..., D].
        angle: Between them, [...] radians.
        t: 0 for the first, 1 for the second.
    """
    sine = angle.sin()
    near = sine < 1e-4  # as good as parallel: a straight line
    safe = sine.where(~near, 1)
    one, two = (((part * angle).sin() / safe).where(~near, angle.new_tensor(part))[..., None] for part in (1 - t, t))
    return one * first + two * second


def _rows_of(x: Tensor, kept: Tensor) -> SlotTable:
    """Return a table of the slots that are kept, and one of zeros for all others."""
    batch, heads, slots, size = x.shape
    count = kept.sum(-1, keepdim=True)
    most = int(count.max()) if kept.numel() else 0
    order = (~kept).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
    number = torch.arange(1, most + 1, device=x.device)
    of = torch.zeros(batch, heads, slots, dtype=torch.long, device=x.device)
    of.scatter_(2, order, (number * (number <= count)).expand_as(order))
    own = x.gather(2, order[..., None].expand(-1, -1, -1, size))
    rows = torch.cat([x.new_zeros(batch, heads, 1, size), own], 2)
    if not most:
        return SlotTable.single(rows[:, :, 0], slots)
    return SlotTable(rows, 1, narrow(of, most + 1))

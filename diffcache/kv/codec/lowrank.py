"""Vectors kept as coordinates in a smaller basis: of each encoded block, or given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import Dense, Exact, Parts, Payload, TensorCodec, all_of, appended, checked, work_dtype
from diffcache.kv.codec.joined_heads import JoinHeads
from diffcache.kv.codec.table import SlotTable, joined_slots
from diffcache.kv.settings import Count

_ROWS = 128  # slots that are multiplied in float64 at a time, so that they stay in a cache


def steady_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left @ right`, summed in float64 and rounded to `dtype`.

    A product in float32 differs in the last bit with the number of rows that are multiplied at a
    time; after rounding a sum in float64 does not, so that a slot decodes to the same numbers
    whichever others are decoded with it.

    Args:
        left: `[..., S, r]`.
        right: `[..., r, D]`.
        dtype: Dtype of the result.
    """
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    size = (*lead, left.shape[-2], right.shape[-1])
    out = torch.empty(size, dtype=dtype, device=left.device)
    step = max(left.shape[-2], 1) if left.device.type != "cpu" else _ROWS
    wide = right.double()
    for some, rows in zip(left.split(step, -2), out.split(step, -2), strict=True):
        rows.copy_(some.double() @ wide)
    return out


@dataclass(frozen=True, eq=False)
class Factors(Parts):
    """Coordinates of every slot, and the basis of the block it was encoded in.

    Args:
        left: Codes `[B, H, S, r]`.
        basis: Rows `[B, H, T, r, D]`, one for every block.
        dtype: Dtype that was encoded, and is decoded to.
    """

    direct = True
    left: Payload
    basis: SlotTable
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the coordinates times the basis."""
        wide, values = work_dtype(self.dtype), self.basis.values
        blocks = self._blocks(self.left.decode())
        if blocks is not None:
            parts = [steady_product(left, basis, wide) for _, left, basis in blocks]
            return joined_slots(parts).to(self.dtype)
        left, of = self.left.decode(), self.basis.of
        assert of is not None
        out = torch.empty(*left.shape[:3], values.shape[-1], dtype=wide, device=left.device)
        for row, head in product(*map(range, left.shape[:2])):
            for number, basis in enumerate(values[row, head]):  # the slots of each basis at once
                (at,) = (of[row, head] == number).nonzero(as_tuple=True)
                out[row, head, at] = steady_product(left[row, head, at], basis, wide)
        return out.to(self.dtype)

    def _blocks(self, coordinates: Tensor) -> list[tuple[int, Tensor, Tensor]] | None:
        """Return the first slot, `[B, H, t, S', r]` and `[B, H, t, r, D]` of runs of blocks.

        None where slots were taken out of their blocks.
        """
        values = self.basis.values.to(coordinates.dtype)
        if self.basis.runs is None:
            return None
        return [
            (
                run.first,
                coordinates[:, :, run.first : run.stop].unflatten(2, (run.rows, run.each)),
                values[:, :, run.row : run.row + run.rows],
            )
            for run in self.basis.runs
        ]

    def near(self) -> Tensor:
        """Return the coordinates times the basis, summed in the dtype of the arithmetic."""
        blocks = self._blocks(self.left.near().to(work_dtype(self.dtype)))
        if blocks is None:
            return self.decode()
        return joined_slots([left @ basis for _, left, basis in blocks]).to(self.dtype)

    def dot(self, q: Tensor) -> Tensor:
        """Return the products of queries with all slots, by their coordinates in each basis."""
        blocks = self._blocks(self.left.near().to(q.dtype))
        if blocks is None:
            return super().dot(q)
        parts = [(q[:, :, None] @ basis.mT @ left.mT).transpose(2, 3) for _, left, basis in blocks]
        return torch.cat([part.flatten(3) for part in parts], 3)

    def mix(self, weights: Tensor) -> Tensor:
        """Return sums of all slots by weights: of their coordinates, which are then multiplied."""
        blocks = self._blocks(self.left.near().to(weights.dtype))
        if blocks is None:
            return super().mix(weights)
        total = weights.new_zeros(*weights.shape[:3], self.basis.values.shape[-1])
        for first, left, basis in blocks:
            count, each = left.shape[2:4]
            some = weights.narrow(3, first, count * each).unflatten(3, (count, each))
            total += (some.transpose(2, 3) @ left @ basis).sum(2)
        return total

    def heads_at(self, index: Tensor) -> Tensor | None:
        """Multiply the coordinates at the slots of each head with its part of the basis."""
        left, values = self.left, self.basis.values
        one = self.basis.of is None and values.shape[1:3] == (1, 1)
        if not one or not isinstance(left, Dense):
            return None
        heads = index.shape[1]
        rows = gather_slots(left.values.expand(-1, heads, -1, -1), index).to(left.dtype)
        own = values[:, 0, 0].unflatten(2, (heads, -1)).transpose(1, 2)
        return steady_product(rows, own, work_dtype(self.dtype)).to(self.dtype)


@dataclass(frozen=True)
class LowRank(TensorCodec):
    """Keep the best approximation of low rank of what is encoded together: its truncated SVD.

    Reference: xKV, arXiv 2503.18893, section 4, within one layer; ShadowKV, arXiv 2410.21465,
    section 4.1 (pre-rotary keys, rank 160). The basis is found from the eigenvectors of `X^T X` in
    float64, which gives the truncated SVD's approximation; coordinates and basis are then stored
    in the dtype that was given. Decoding sums in float64, so that only a float64 tensor may differ
    in its last bit with the slots that are decoded together. Every encoded block has a basis of its
    own, `rank` vectors, so it should hold many more slots than that.

    Args:
        rank: Basis vectors, at least 1; as many as there are channels loses nothing.
        inner: Codec of the coordinates; None keeps them in the dtype that was given.
        joint: One basis for all heads of a slot side by side, or one for each head.
    """

    rank: Count
    inner: TensorCodec | None = None
    joint: bool = False

    def encode(self, x: Tensor) -> Payload:
        """Code a tensor `[B, H, S, D]`."""
        checked(x, self.multiple)
        if self.joint:
            return JoinHeads(replace(self, joint=False)).encode(x)
        exact = x.double()
        vectors = torch.linalg.eigh(exact.mT @ exact).eigenvectors  # rising eigenvalues
        basis = vectors[..., -min(self.rank, x.shape[3]) :].flip(-1).mT.to(x.dtype)
        left = (exact @ basis.double().mT).to(work_dtype(x.dtype))
        coded = (self.inner or Exact(x.dtype)).encode(left)
        return Factors(coded, SlotTable.single(basis.contiguous(), x.shape[2]), x.dtype)

    def join(self, parts: Sequence[Payload]) -> Payload:
        """Append slots; each keeps the basis it was encoded in."""
        if self.joint:
            return JoinHeads(replace(self, joint=False)).join(parts)
        return appended(all_of(Factors, parts), left=self.inner or Exact())


@dataclass(frozen=True, eq=False)
class Projected(Parts):
    """Coordinates `[B, H, S, r]` in a basis `[r, D]` that is not theirs to keep."""

    fixed: ClassVar[tuple[str, ...]] = ("up",)
    left: Payload
    up: Tensor
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the coordinates times the basis."""
        wide = work_dtype(self.dtype)
        return steady_product(self.left.decode(), self.up, wide).to(self.dtype)


@dataclass(frozen=True, eq=False)
class StaticLowRank(TensorCodec):
    """Keep `x @ down` and decode it with `@ up`, two matrices that were fitted beforehand.

    Reference: CSKV, arXiv 2409.10593, section 2.1, where the product of the two stands in for the
    identity on the outputs of a layer's key or value projection.

    Args:
        down: `[heads * D, r]`; all H heads of a slot side by side, a divisor of H of them, or one.
        up: `[r, heads * D]`.
        inner: Codec of the coordinates; None keeps them in the dtype that was given.
    """

    down: Tensor
    up: Tensor
    inner: TensorCodec | None = None

    def check(self) -> None:
        """Raise ValueError if the shapes of the two do not match."""
        if self.down.dim() != 2 or self.up.shape != self.down.shape[::-1]:
            raise ValueError(
                f"down has shape {list(self.down.shape)} and up {list(self.up.shape)}: give"
                " [heads * D, r] and [r, heads * D]"
            )

    def encode(self, x: Tensor) -> Payload:
        """Code a tensor `[B, H, S, D]`; raise ValueError if the rows of `down` are no multiple of D."""
        size = checked(x, self.multiple).shape[3]
        if self.down.shape[0] == size:
            left = steady_product(x, self.down.to(x.device), work_dtype(x.dtype))
            coded = (self.inner or Exact(x.dtype)).encode(left)
            return Projected(coded, self.up.to(x.device), x.dtype)
        if self.down.shape[0] % size:
            raise ValueError(f"down has {self.down.shape[0]} rows: no multiple of D={size}")
        return JoinHeads(self, self.down.shape[0] // size).encode(x)

    def join(self, parts: Sequence[Payload]) -> Payload:
        """Append slots."""
        if parts and not isinstance(parts[0], Projected):
            return JoinHeads(self).join(parts)
        return appended(all_of(Projected, parts), left=self.inner or Exact())

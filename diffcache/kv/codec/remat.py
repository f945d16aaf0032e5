"""Hold what keys and values are made of, and make them again when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.codec.base import Parts, Payload, TensorCodec, all_of, same, work_dtype
from diffcache.kv.codec.joined_layers import LayersCodec
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieve import Retriever
from diffcache.kv.slots import Slots
from diffcache.kv.view import View


@dataclass(frozen=True, eq=False)
class Projections:
    """Weights that make keys and values of a layer from its inputs; they are the model's own.

    Args:
        k: [H * D, hidden].
        v: [H * Dv, hidden].
        heads: H.
        k_bias: [H * D], or None.
        v_bias: [H * Dv], or None.
    """

    k: Tensor
    v: Tensor
    heads: int
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys before rotation and values, [B, H, S, D], of inputs [B, S, hidden]."""
        k = functional.linear(x, self.k, self.k_bias)
        v = functional.linear(x, self.v, self.v_bias)
        return self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Rematerialise(Retriever):
    """Read keys and values of layers that hold their inputs [B, 1, S, hidden] in place of keys.

    Reference: XQuant, arXiv 2508.10395.

    Args:
        projections: Key and value projections of each layer that is held.
    """

    projects: ClassVar[bool] = True
    projections: tuple[Projections, ...]

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return all slots, made again and rotated, or raise ValueError if the layer holds something else."""
        slots = layer.read()
        wanted = self.projections[layer.index].k.shape[1]
        if slots.k.shape[1] != 1 or slots.k.shape[3] != wanted:
            raise ValueError(
                f"layer {layer.index} holds {list(slots.k.shape)}, not inputs [B, 1, S, {wanted}]: "
                "make the cache with diffcache.kv.hf.layer_inputs.remat_cache_for"
            )
        k, v = self.projections[layer.index](slots.k[:, 0])
        start = None
        if not layer.segments and layer.tail.is_plain:
            start = layer.tail.start
        return [View(layer.rotated(Slots(k, v, slots.meta)), start)]


@dataclass(frozen=True, eq=False)
class Void(Payload):
    """A tensor without channels, [B, H, S, 0]."""

    like: Tensor
    slots: int

    def decode(self) -> Tensor:
        """Return it."""
        return self.like.new_empty(*self.like.shape[:2], self.slots, 0)

    def take(self, index: Tensor) -> Void:
        """Count slots."""
        return Void(self.like.expand(*index.shape[:2], 0, 0), index.shape[2])

    def rows(self, index: Tensor) -> Void:
        """Take batch rows."""
        return replace(self, like=self.like[index])


@dataclass(frozen=True)
class Nothing(TensorCodec):
    """Hold tensors without channels, where the inputs of a layer stand for keys and values."""

    def encode(self, x: Tensor) -> Void:
        """Code a tensor [B, H, S, 0]; raise ValueError if it has channels."""
        if x.dim() != 4 or x.shape[3]:
            raise ValueError(f"x has shape {list(x.shape)}: must be [B, H, S, 0]")
        return Void(x.new_empty(*x.shape[:2], 0, 0), x.shape[2])

    def join(self, parts: Sequence[Payload]) -> Void:
        """Count slots."""
        found = all_of(Void, parts)
        return replace(found[0], slots=sum(part.slots for part in found))


@dataclass(frozen=True, eq=False)
class Delta(Parts):
    """Difference of a layer to the decoded layer before it."""

    before: Payload
    own: Payload
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the sum."""
        wide = work_dtype(self.dtype)
        return (self.before.decode().to(wide) + self.own.decode().to(wide)).to(self.dtype)


@dataclass(frozen=True)
class Deltas(LayersCodec):
    """Code the first layer, and of each other the difference to the decoded layer before it.

    Errors do not add up over layers: each difference is to what is decoded.

    Reference: XQuant-CL, arXiv 2508.10395.

    Args:
        first: Codec of the first layer.
        delta: Codec of the differences.
    """

    first: TensorCodec
    delta: TensorCodec

    @property
    def multiple(self) -> int:
        """Slots that are coded at once: the larger number of the two codecs."""
        return max(self.first.multiple, self.delta.multiple)

    def encode(self, xs: Sequence[Tensor]) -> list[Payload]:
        """Code the layers."""
        found: list[Payload] = [self.first.encode(xs[0])]
        for x in xs[1:]:
            wide = work_dtype(x.dtype)
            gap = x.to(wide) - found[-1].decode().to(wide)
            found.append(Delta(found[-1], self.delta.encode(gap), x.dtype))
        return found

    def join(self, layers: Sequence[Sequence[Payload]]) -> list[Payload]:
        """Append, and share layers that are the same."""
        found: list[Payload] = []
        for parts in layers:
            found.append(self._joined(parts, found[-1] if found else None))
        return found

    def _joined(self, parts: Sequence[Payload], earlier: Payload | None) -> Payload:
        if not isinstance(parts[0], Delta):
            return self.first.join(parts)
        deltas = all_of(Delta, parts)
        below = earlier.before if isinstance(earlier, Delta) else None
        before = self._joined([part.before for part in deltas], below)
        if earlier is not None and same(before, earlier):
            before = earlier
        return replace(deltas[0], before=before, own=self.delta.join([p.own for p in deltas]))

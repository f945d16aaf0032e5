"""Codecs of the settled slots of layers, and the times at which tokens reach them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.codec.base import TensorCodec
from diffcache.kv.codec.tails import (
    append,
    appended_meta,
    cut,
    due,
    filled_up,
    gather_exact,
    own_meta,
    set_apart,
    without_gaps,
)
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import Observation
from diffcache.kv.segment import Coded, Dense, Segment
from diffcache.kv.settings import Count, Settings, Whole
from diffcache.kv.slots import Slots


class KVCodec(Settings, ABC):
    """Form in which settled slots are held; a frozen dataclass of settings."""

    scope: int = 1  # neighboring layers that are held together

    def flush(self, layers: Sequence[KVLayer]) -> None:
        """Turn what has grown in the tails of `scope` layers into segments, as far as it is due.

        By default tails are left alone: slots come from the plan.
        """

    @abstractmethod
    def hold(self, slots: Slots, level: int) -> Segment:
        """Return slots held by this codec, for a ladder."""

    def align(self, layer: KVLayer) -> None:
        """Code what is only half coded, so that slots can be dropped."""

    def hold_beside(self, slots: Slots, level: int, seen: Observation, old: Segment | None) -> Segment:
        """Return slots held by this codec, for a ladder that holds others at this level already.

        Args:
            slots: Slots that come to this level.
            level: The level.
            seen: Observation of the layer that the slots are of.
            old: Slots that are held at this level already; None for none.
        """
        return self.hold(slots, level)

    def joined(self, first: Segment, second: Segment) -> Segment | None:
        """Return two segments of this codec as one, nothing coded anew; None if it cannot."""
        return None

    def converted(self, segment: Segment, index: Tensor, keep: Tensor, level: int) -> Segment | None:
        """Return slots of a segment of another level without decoding them; None if it cannot.

        Args:
            segment: Slots that another codec of the ladder holds.
            index: int64 [B, H, n], slots of each row.
            keep: bool [B, H, n]; the others come out empty.
            level: The level they come to.
        """
        return None


@dataclass(frozen=True)
class Pair(KVCodec):
    """A codec for keys and one for values, of one layer.

    Args:
        keys: Codec of the keys.
        values: Codec of the values.
        block: Tokens that are coded at once.
        recent: Tokens that always stay exact.
        slide: Values are coded one by one as they leave the last `block` tokens, rather than
            `block` at once as keys are (KIVI, arXiv 2402.02750, algorithm 1).
        whole: Code all that is due at once as soon as it is `block` tokens or more, rather than a
            multiple of `block`.
        sinks: First tokens of each row that stay exact.
    """

    keys: TensorCodec
    values: TensorCodec
    block: Count = 128
    recent: Whole = 0
    slide: bool = False
    whole: bool = False
    sinks: Whole = 0

    def check(self) -> None:
        """Raise ValueError if `block` is no multiple of what codecs need."""
        for name, codec in (("keys", self.keys), ("values", self.values)):
            if self.block % codec.multiple:
                raise ValueError(
                    f"block={self.block}: {name} are coded {codec.multiple} tokens at a time; "
                    f"give a multiple of {codec.multiple}"
                )
        if self.slide and (self.values.multiple != 1 or self.recent):
            raise ValueError("slide=True: values must be coded token by token, with recent=0")

    def flush(self, layers: Sequence[KVLayer]) -> None:
        """Code full blocks of the tail, and values that have left the last tokens."""
        (layer,) = layers
        gather_exact(layer)
        length = layer.tail.length - self._missing(layer) - self.recent
        count = due(length, self.block, self.whole, self.multiple)
        if count > 0:
            if self._missing(layer):
                set_apart(layer, self.sinks)
            self._add(layer, *cut(layer, count))
        if self.slide:
            self._slide(layer)

    @property
    def multiple(self) -> int:
        """Tokens that must be coded together."""
        return math.lcm(self.keys.multiple, self.values.multiple)

    def hold(self, slots: Slots, level: int) -> Coded:
        """Return the slots, coded; rows are filled up to what the codecs need."""
        slots = without_gaps(filled_up(slots, self.multiple))
        meta = {name: value.clone() for name, value in slots.meta.items()}
        k, v = self.keys.encode(slots.k), self.values.encode(slots.v)
        return Coded(k, v, meta, slots.width, level=level)

    def joined(self, first: Segment, second: Segment) -> Segment | None:
        """Return two coded segments as one."""
        if not isinstance(first, Coded) or not isinstance(second, Coded):
            return None
        return self._append(first, second)

    def align(self, layer: KVLayer) -> None:
        """Code the values that wait for their keys' company."""
        layer.segments = [
            self._values(segment, segment.exact.shape[2])
            if isinstance(segment, Coded) and segment.exact is not None
            else segment
            for segment in layer.segments
        ]

    def _missing(self, layer: KVLayer) -> int:
        """Return the first tokens that are still to be set apart."""
        apart = any(isinstance(segment, Dense) for segment in layer.segments)
        return 0 if apart else self.sinks

    def _add(self, layer: KVLayer, slots: Slots, first: int | None) -> None:
        """Append a block to the last segment, or begin one."""
        meta = own_meta(slots, first)
        k = self.keys.encode(slots.k)
        late = slots.v[:, :, :0] if self.slide else slots.v
        v = self.values.encode(late)
        exact = slots.v.clone() if self.slide else None
        append(layer, Coded(k, v, meta, slots.width, first or 0, exact), self._append)

    def _append(self, old: Coded, new: Coded) -> Coded:
        exact = new.exact
        k, v = self.keys.join([old.k, new.k]), self.values.join([old.v, new.v])
        if old.exact is not None and new.exact is not None:
            exact = torch.cat([old.exact, new.exact], 2)
        meta, size = appended_meta(old, new), old.size + new.size
        return replace(old, k=k, v=v, meta=meta, size=size, exact=exact)

    def _slide(self, layer: KVLayer) -> None:
        last = layer.segments[-1] if layer.segments else None
        if not isinstance(last, Coded) or last.exact is None:
            return
        count = min(last.exact.shape[2] + layer.tail.length - self.block, last.exact.shape[2])
        if count > 0:
            layer.segments[-1] = self._values(last, count)

    def _values(self, segment: Coded, count: int) -> Coded:
        """Code `count` more values."""
        exact = segment.exact
        assert exact is not None
        v = self.values.join([segment.v, self.values.encode(exact[:, :, :count])])
        rest = exact[:, :, count:].clone() if count < exact.shape[2] else None
        return replace(segment, v=v, exact=rest)


@dataclass(frozen=True)
class ByLayer(KVCodec):
    """A codec of its own for layer 0, 1, ... of the model; None leaves a layer exact."""

    codecs: tuple[KVCodec | None, ...]

    def check(self) -> None:
        """Raise ValueError if one of them holds several layers together."""
        if any(codec is not None and codec.scope != 1 for codec in self.codecs):
            raise ValueError("codecs: each must hold one layer; give scope > 1 for all layers")

    def flush(self, layers: Sequence[KVLayer]) -> None:
        """Let the layer's codec do it."""
        for layer in layers:
            codec = self._of(layer)
            if codec is not None:
                codec.flush([layer])

    def hold(self, slots: Slots, level: int) -> Segment:
        """Raise ValueError: slots do not say which layer they are of."""
        raise ValueError("a codec for each layer is no rung of a ladder; use one for all layers")

    def align(self, layer: KVLayer) -> None:
        """Let the layer's codec do it."""
        codec = self._of(layer)
        if codec is not None:
            codec.align(layer)

    def _of(self, layer: KVLayer) -> KVCodec | None:
        if layer.index >= len(self.codecs):
            raise ValueError(f"codecs: {len(self.codecs)}, none for layer {layer.index}")
        return self.codecs[layer.index]

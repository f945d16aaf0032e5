"""Hold neighboring layers together, and store once the numbers that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.codec.base import Payload, TensorCodec, tensors
from diffcache.kv.codec.held import KVCodec
from diffcache.kv.codec.tails import append, appended_meta, cut, due, filled_up, gather_exact, own_meta, without_gaps
from diffcache.kv.layer import KVLayer
from diffcache.kv.segment import Coded, Segment
from diffcache.kv.settings import Count, Settings, Whole
from diffcache.kv.slots import Slots


class LayersCodec(Settings, ABC):
    """Code for the keys, or the values, of neighboring layers; a frozen dataclass.

    Payloads of several layers share tensors, which count once. They are what `take` and `rows`
    part: layers that keep different slots share nothing, and decode to the same numbers.
    """

    @property
    def multiple(self) -> int:
        """Slots that must be coded together."""
        inner: TensorCodec | None = getattr(self, "inner", None)
        return 1 if inner is None else inner.multiple

    @abstractmethod
    def encode(self, xs: Sequence[Tensor]) -> list[Payload]:
        """Code the same slots [B, H, S, D] of several layers; one layer alone is coded without others."""

    @abstractmethod
    def join(self, layers: Sequence[Sequence[Payload]]) -> list[Payload]:
        """Append payloads of each layer, made by this codec, along the slots, without coding anything again."""


@dataclass(frozen=True)
class Single(LayersCodec):
    """A tensor codec for each layer alone."""

    inner: TensorCodec

    def encode(self, xs: Sequence[Tensor]) -> list[Payload]:
        """Code each."""
        return [self.inner.encode(x) for x in xs]

    def join(self, layers: Sequence[Sequence[Payload]]) -> list[Payload]:
        """Append each."""
        return [self.inner.join(parts) for parts in layers]


@dataclass(frozen=True)
class Together(KVCodec):
    """Codecs for the keys and for the values of `scope` neighboring layers.

    Layers whose exact slots are not at the same positions, because a plan dropped others in each,
    are coded alone.

    Args:
        keys: Codec of the keys.
        values: Codec of the values.
        scope: Number of neighboring layers that are coded together.
        block: Tokens that are coded at once.
        recent: Tokens that always stay exact.
        whole: Code all that is due at once as soon as it is `block` tokens or more.
    """

    keys: LayersCodec
    values: LayersCodec
    scope: Count = 2
    block: Count = 128
    recent: Whole = 0
    whole: bool = False

    def check(self) -> None:
        """Raise ValueError if `block` is no multiple of what codecs need."""
        if self.block % self.multiple:
            raise ValueError(
                f"block={self.block}: must be a multiple of {self.multiple}, the tokens that are coded together"
            )

    @property
    def multiple(self) -> int:
        """Tokens that must be coded together."""
        keys, values = self.keys.multiple, self.values.multiple
        return keys * values if keys % values and values % keys else max(keys, values)

    def flush(self, layers: Sequence[KVLayer]) -> None:
        """Code what is due in the tails."""
        for layer in layers:
            gather_exact(layer)
        for group in [layers] if alike(layers) else [[layer] for layer in layers]:
            length = group[0].tail.length - self.recent
            count = due(length, self.block, self.whole, self.multiple)
            if count > 0:
                self._code(group, [cut(layer, count) for layer in group])
        self._share_again(layers)

    def hold(self, slots: Slots, level: int) -> Coded:
        """Return slots of one layer, coded alone."""
        slots = without_gaps(filled_up(slots, self.multiple))
        (k,), (v,) = self.keys.encode([slots.k]), self.values.encode([slots.v])
        meta = {name: value.clone() for name, value in slots.meta.items()}
        return Coded(k, v, meta, slots.width, level=level)

    def joined(self, first: Segment, second: Segment) -> Segment | None:
        """Return two coded segments of one layer as one."""
        if not isinstance(first, Coded) or not isinstance(second, Coded):
            return None
        return self._append([first], [second])[0]

    def _code(self, layers: Sequence[KVLayer], parts: Sequence[tuple[Slots, int | None]]) -> None:
        ks = self.keys.encode([slots.k for slots, _ in parts])
        vs = self.values.encode([slots.v for slots, _ in parts])
        new = [
            Coded(k, v, own_meta(slots, first), slots.width, first or 0)
            for k, v, (slots, first) in zip(ks, vs, parts, strict=True)
        ]
        old = [layer.segments[-1] if layer.segments else None for layer in layers]
        coded = [each for each in old if isinstance(each, Coded) and not each.level]
        if len(coded) == len(layers):
            for layer, both in zip(layers, self._append(coded, new), strict=True):
                layer.segments[-1] = both
            return
        for layer, each in zip(layers, new, strict=True):
            append(layer, each, lambda one, two: self._append([one], [two])[0])

    def _share_again(self, layers: Sequence[KVLayer]) -> None:
        """Have layers share what they hold alike, where taking rows of a batch parted them."""
        last = [layer.segments[-1] if layer.segments else None for layer in layers]
        held = [each for each in last if isinstance(each, Coded) and not each.level]
        if len(held) < max(len(layers), 2) or not _same_places(held):
            return
        for side in ("k", "v"):  # what is shared comes first in payloads
            firsts = {next(tensors(getattr(each, side))).data_ptr() for each in held}
            if len(firsts) == 1:
                return  # they do
        ks = self.keys.join([[each.k] for each in held])
        vs = self.values.join([[each.v] for each in held])
        for layer, each, k, v in zip(layers, held, ks, vs, strict=True):
            layer.segments[-1] = replace(each, k=k, v=v)

    def _append(self, old: Sequence[Coded], new: Sequence[Coded]) -> list[Coded]:
        pairs = list(zip(old, new, strict=True))
        ks = self.keys.join([[a.k, b.k] for a, b in pairs])
        vs = self.values.join([[a.v, b.v] for a, b in pairs])
        return [
            replace(a, k=k, v=v, meta=appended_meta(a, b), size=a.size + b.size)
            for (a, b), k, v in zip(pairs, ks, vs, strict=True)
        ]


def _same_places(held: Sequence[Coded]) -> bool:
    """Return whether segments of layers hold tokens at the same positions."""
    first = held[0]
    if any(each.size != first.size or each.first != first.first for each in held):
        return False
    pos = first.meta.get("pos")
    return pos is None or all(torch.equal(pos, each.meta["pos"]) for each in held)


def alike(layers: Sequence[KVLayer]) -> bool:
    """Return whether the tails of layers hold tokens at the same positions."""
    tails = [layer.tail for layer in layers]
    if len({tail.length for tail in tails}) > 1:
        return False
    if all(tail.start is not None for tail in tails):
        return len({tail.start for tail in tails}) == 1
    slots = [tail.read() for tail in tails]
    known = [each.pos for each in slots if each is not None]
    return len(known) == len(layers) and all(torch.equal(*torch.broadcast_tensors(known[0], pos)) for pos in known[1:])

"""Codecs of one tensor of keys or values, their payloads, and the bytes of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.table import SlotTable, join_tables
from diffcache.kv.settings import FloatType, Settings


class Payload(ABC):
    """One coded tensor `[B, H, S, D]`: a frozen dataclass of tensors and plain values, immutable.

    No method writes to a tensor of the payload, and what `take` and `rows` return may share them.

    Attributes:
        direct: Whether products with what is held (`dot`, `mix`) cost less than with `decode`.
    """

    direct: bool = False

    @abstractmethod
    def decode(self) -> Tensor:
        """Return `[B, H, S, D]` in the dtype that was encoded."""

    def decode_into(self, out: Tensor) -> None:
        """Write what `decode` returns into a tensor `[B, H, S, D]` of any strides."""
        out.copy_(self.decode())

    def decode_at(self, index: Tensor) -> Tensor:
        """Return `decode` gathered at slots `[B, H, n]` int64, bit for bit, decoding no others."""
        return self.take(index).decode()

    def near(self) -> Tensor:
        """Return `decode` but for rounding: sums may be of any order, in float32."""
        return self.decode()

    def dot(self, q: Tensor) -> Tensor:
        """Return products of queries `[B, H, n, D]` and slots, `[B, H, n, S]` in their dtype, but for rounding."""
        return q @ self.near().to(q.dtype).mT

    def mix(self, weights: Tensor) -> Tensor:
        """Return sums of slots by weights `[B, H, n, S]`, `[B, H, n, D]` in their dtype, but for rounding."""
        return weights @ self.near().to(weights.dtype)

    def heads_at(self, index: Tensor) -> Tensor | None:
        """Return what `decode_at` returns of heads that are coded as one vector, each at its slots.

        Args:
            index: `[B, H, n]` int64, slots of each of the heads that the channels are of in turn.

        Returns:
            `[B, H, n, D]`; None where decoding whole vectors is no slower.
        """
        return None

    @abstractmethod
    def take(self, index: Tensor) -> Payload:
        """Keep some slots, in the order given, without coding anything again.

        Args:
            index: `[B, H, n]` int64, slots of each row and head; a slot may be taken twice.

        Returns:
            A payload whose `decode` is bit for bit `decode` gathered at `index`.
        """

    @abstractmethod
    def rows(self, index: Tensor) -> Payload:
        """Keep some batch rows, `[m]` int64, in the order given; a row may be taken twice (beam search)."""


Q = TypeVar("Q", bound="Parts")


class Parts(Payload):
    """A payload whose fields say by their kind what becomes of them.

    Tensors are `[B, H, S, ...]` and payloads and tables know their slots; other fields, and those
    that are named in `fixed`, are of no slot.
    """

    fixed: ClassVar[tuple[str, ...]] = ()

    def take(self: Q, index: Tensor) -> Q:
        """Keep some slots of every part."""
        return self._changed(lambda part: gather_slots(part, index) if isinstance(part, Tensor) else part.take(index))

    def rows(self: Q, index: Tensor) -> Q:
        """Keep some batch rows of every part."""
        return self._changed(lambda part: part[index] if isinstance(part, Tensor) else part.rows(index))

    def _changed(self: Q, change: Callable[[Any], Any]) -> Q:
        parts = {name: part for name, part in vars(self).items() if name not in self.fixed}
        kinds = (Tensor, Payload, SlotTable)
        return _replaced(self, {name: change(part) for name, part in parts.items() if isinstance(part, kinds)})


def _replaced(payload: Q, changes: Mapping[str, Any]) -> Q:
    """Return a copy of a payload with some parts changed."""
    new = copy(payload)
    for name, part in changes.items():
        object.__setattr__(new, name, part)
    return new


def appended(parts: Sequence[Q], **inner: TensorCodec) -> Q:
    """Append payloads of one kind along the slots, each part by what it is: payloads by the codec of their name."""
    changes: dict[str, Any] = {}
    for name, value in vars(parts[0]).items():
        each = [getattr(part, name) for part in parts]
        if name in parts[0].fixed:
            continue
        if isinstance(value, SlotTable):
            changes[name] = join_tables(each)
        elif isinstance(value, Tensor):
            changes[name] = torch.cat(each, 2)
        elif isinstance(value, Payload):
            changes[name] = inner[name].join(each)
    return _replaced(parts[0], changes)


def same(one: Payload | Tensor, other: Payload | Tensor) -> bool:
    """Return whether two tensors or payloads hold the same numbers."""
    mine, theirs = list(tensors(one)), list(tensors(other))
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def sharing(parts: Sequence[Q], name: str) -> list[Q]:
    """Return payloads that share the first one's part `name` where theirs holds the same numbers."""
    lead = getattr(parts[0], name)
    return [_replaced(part, {name: lead}) if same(lead, getattr(part, name)) else part for part in parts]


class TensorCodec(Settings, ABC):
    """Code for one tensor `[B, H, S, D]`; a frozen dataclass of settings, final.

    A codec knows nothing of positions; slots are counted along the third axis.
    """

    @property
    def multiple(self) -> int:
        """Slots that must be coded together: `S` of `encode` is a multiple of it."""
        inner: TensorCodec | None = getattr(self, "inner", None)
        return 1 if inner is None else inner.multiple

    @abstractmethod
    def encode(self, x: Tensor) -> Payload:
        """Code a tensor.

        Args:
            x: `[B, H, S, D]`, a float dtype; `S` is a multiple of `multiple` and may be 0.

        Raises:
            ValueError: If the shape or dtype is not as said.
        """

    @abstractmethod
    def join(self, parts: Sequence[Payload]) -> Payload:
        """Append payloads of this codec along the slots, without coding anything again.

        Args:
            parts: Payloads of this codec with the same B, H and D, at least one.

        Returns:
            A payload whose `decode` is bit for bit the concatenation of theirs.

        Raises:
            ValueError: If there is no part.
            TypeError: If a part is of another codec.
        """


def checked(x: Tensor, multiple: int = 1) -> Tensor:
    """Return `x` if a codec can code it.

    Args:
        x: `[B, H, S, D]`, a float dtype.
        multiple: Divisor of `S` that is required, in slots.

    Raises:
        ValueError: If the shape or the dtype is another, naming it.
    """
    if x.dim() != 4:
        raise ValueError(f"x has shape {list(x.shape)}: a codec takes [B, H, S, D]")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}: a codec takes a float dtype")
    if x.shape[3] < 1:
        raise ValueError("x has no channels: the last axis must be at least 1")
    if x.shape[2] % multiple:
        raise ValueError(
            f"x has {x.shape[2]} slots: this codec codes {multiple} at a time, so give a multiple"
            f" of {multiple} and keep the rest uncoded"
        )
    return x


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic is done in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


P = TypeVar("P", bound=Payload)


def all_of(kind: type[P], parts: Sequence[Payload]) -> list[P]:
    """Return `parts` if there is one and all are of `kind`.

    Raises:
        ValueError: If there is no part.
        TypeError: If a part is of another kind, naming it.
    """
    if not parts:
        raise ValueError("parts is empty: join needs at least one payload")
    found = [part for part in parts if isinstance(part, kind)]
    if len(found) < len(parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise TypeError(f"parts are {kinds}: this codec joins {kind.__name__} only")
    return found


def tensors(obj: object) -> Iterator[Tensor]:
    """Yield every tensor inside nested dataclasses, sequences and mappings, each once; plain values hold none."""
    seen: set[int] = set()

    def walk(item: object) -> Iterator[Tensor]:
        if id(item) in seen:
            return
        if isinstance(item, Tensor):
            seen.add(id(item))
            yield item
        elif is_dataclass(item) and not isinstance(item, type):
            seen.add(id(item))
            for field in fields(item):
                yield from walk(getattr(item, field.name))
        elif isinstance(item, Mapping):
            for value in item.values():
                yield from walk(value)
        elif isinstance(item, (tuple, list)):
            for value in item:
                yield from walk(value)

    yield from walk(obj)


def nbytes(obj: object) -> int:
    """Return the bytes of memory that the tensors inside `obj` keep alive.

    Every storage counts once and whole, however many tensors are views of it, or of however small
    a part of it: what a view holds back from being freed is held.
    """
    storages = {
        (tensor.device, storage.data_ptr()): storage.nbytes()
        for tensor in tensors(obj)
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


@dataclass(frozen=True, eq=False)
class Dense(Parts):
    """A tensor kept as it is, in `values.dtype`; decoded to `dtype`."""

    values: Tensor
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the values, `[B, H, S, D]`."""
        return self.values.to(self.dtype)


@dataclass(frozen=True)
class Exact(TensorCodec):
    """Keep a tensor as it is, or rounded to another float dtype.

    Args:
        dtype: Dtype that is stored; None for the dtype that is given, which loses nothing.
    """

    dtype: FloatType | None = None

    def encode(self, x: Tensor) -> Dense:
        """Keep `x` itself where the dtype is the same and `x` is no part of a larger tensor."""
        values = checked(x).to(self.dtype or x.dtype)
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone(memory_format=torch.contiguous_format)
        return Dense(values, x.dtype)

    def join(self, parts: Sequence[Payload]) -> Dense:
        """Concatenate."""
        return appended(all_of(Dense, parts))

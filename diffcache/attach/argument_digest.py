"""Content of the arguments of a call, by which a table of conditions is keyed."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from diffcache.digest import bits_of
from diffcache.foreign import version_of

_SMALL = 256  # bytes of a tensor whose content is its own key


class Same:
    """Stands for an object in a key: equal to itself alone, which it keeps alive."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


class Contents:
    """Reads tensors, each once as long as it is not written to."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Any, bytes]] = {}

    def of(self, tensor: Tensor) -> bytes:
        """Return what tells the contents of a tensor apart; waits for the device.

        The very tensor that was read before is not read again if its version is the same, where
        that would make a device wait or take long.
        """
        plain = tensor.is_inference() or (tensor.device.type == "cpu" and tensor.nbytes <= _SMALL)
        if plain:
            return _read(tensor)
        mark = (version_of(tensor), tensor.data_ptr())
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != mark:
            known = self._known[id(tensor)] = weakref.ref(tensor), mark, _read(tensor)
        return known[2]


def _read(tensor: Tensor) -> bytes:
    content = bits_of(tensor.cpu()).numpy().tobytes()
    return content if len(content) <= _SMALL else hashlib.sha256(content).digest()


def tensors_in(given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among arguments, by their paths."""
    return {path: value for path, value in _walk(given) if isinstance(value, Tensor)}


def others_in(given: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what is no tensor among arguments, hashable, with its path."""
    return tuple(
        (path, hashable(value)) for path, value in _walk(given) if not isinstance(value, Tensor)
    )


def values_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an argument, and what is no tensor, hashable, with their paths."""
    for path, inner in _walk(value, name):
        yield path, inner if isinstance(inner, Tensor) else hashable(inner)


def hashable(value: Any) -> Any:
    """Return what tells a value that is no tensor apart: number and text by content."""
    return (type(value), value) if _is_plain(value) else Same(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, (list, tuple)):
        inside = list(enumerate(value))
    else:
        yield path, value
        return
    for name, item in inside:
        yield from _walk(item, f"{path}.{name}" if path else str(name))

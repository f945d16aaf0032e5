"""Look of a denoiser call, without values, and content of its arguments, which keys tables."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor

from diffcache.attach.anatomy import Anatomy, is_time
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
        """Return a key of the contents of a tensor; waits for the device.

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
    """Return the arguments that are no tensors, hashable, with their paths."""
    return tuple((path, hashable(value)) for path, value in _walk(given) if not isinstance(value, Tensor))


def hashable(value: Any) -> Any:
    """Return a key of a value that is no tensor: number and text by content."""
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


# content of arguments -----------------------------------------------------------------------------


_CONTROL = re.compile("control|residual")


def signature_of(given: dict[str, Any], timestep: str | None) -> Any:
    """Return a hashable description of a call by its arguments, but for the timestep.

    Tensors count with shape, dtype and device, None and strings and whole numbers inside lists
    (skipped layers, image shapes) and numbers called `..._scale` (of control networks) with their
    value, other numbers with their type. Features of a call stand in for those of another only if
    both look alike.
    """
    parts: list[Any] = []
    for name, value in given.items():
        if name == timestep:
            continue
        if type(value) is Tensor:
            parts += (name, value.shape, value.dtype, value.device)
        else:
            plain = value is None or value is True or value is False
            scales = type(value) is float and name.endswith("_scale")
            parts += (name, value if plain or scales else _look(value))
    return tuple(parts)


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return type(value)
    if isinstance(value, (list, tuple)):
        return tuple([_item(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _look(item)) for key, item in value.items()])
    return type(value)


def _item(value: Any) -> Any:
    return value if type(value) is int else _look(value)


def conditions_of(given: dict[str, Any], anatomy: Anatomy) -> dict[str, Tensor]:
    """Return the tensor arguments besides the sample and the timestep, by name."""
    left_out = (anatomy.timestep, anatomy.sample, "hidden_states", "sample")
    return {n: v for n, v in given.items() if isinstance(v, Tensor) and n not in left_out}


def all_conditions_of(given: dict[str, Any], anatomy: Anatomy) -> dict[str, Any]:
    """Return the conditions of a call by path: values that stay the same from step to step.

    Left out are the sample, the time and the outputs of control networks, which move with them.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == anatomy.sample or _moves(name):
            continue
        if type(value) is Tensor:  # most are: the fast way
            found[name] = value
        elif _is_plain(value):
            found[name] = type(value), value
        elif not isinstance(value, (dict, list, tuple)) or value:  # an empty one has no values
            found |= {p: v if isinstance(v, Tensor) else hashable(v) for p, v in _walk(value, name)}
    return found


@lru_cache(maxsize=1024)
def _moves(name: str) -> bool:
    """Return whether an argument of that name changes from step to step."""
    return is_time(name) or _CONTROL.search(name) is not None


def writes_cache(kwargs: dict[str, Any]) -> bool:
    """Return whether a call may write to a KV cache it was given; such blocks are never skipped."""
    given = {n: v for n, v in kwargs.items() if "kv_cache" in n and v is not None}
    modes = [value for value in given.values() if isinstance(value, str)]
    flags = [flag for v in given.values() if isinstance(v, dict) for flag in v.values()]
    if modes:
        return any(mode not in ("cached", "read") for mode in modes)
    if any(isinstance(flag, bool) for flag in flags):
        return any(flag is True for flag in flags)
    return bool(given)

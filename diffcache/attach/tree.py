"""Flatten the outputs of modules, and put them together again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_LEAF = object()


def outputs_of(out: Any) -> tuple[Any, ...]:
    """Return a module's outputs as a tuple; a lone tensor is a tuple of one."""
    if isinstance(out, (tuple, list)):
        return tuple(out)
    return (out,)


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors inside nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                found.append(item)
            elif item is not None:
                found += leaves(item)
    return found


class Template:
    """The shape of a nested output without its tensors."""

    __slots__ = ("flat", "root")

    def __init__(self, value: Any) -> None:
        self.root = _strip(value)
        self.flat = isinstance(value, tuple) and all(isinstance(item, Tensor) for item in value)

    def build(self, tensors: list[Tensor]) -> Any:
        """Return the output with `tensors` in the places of its tensors."""
        if self.root is _LEAF:
            return tensors[0]
        if self.flat:
            return tuple(tensors)
        return _build(self.root, iter(tensors))


def unshared(value: Any) -> Any:
    """Return `value` with its lists and dicts copied, which a model may empty; tensors are not."""
    if type(value) in (list, tuple):
        return type(value)([unshared(item) for item in value])
    if type(value) is dict:
        return {key: unshared(item) for key, item in value.items()}
    return value


def hollow(value: Any) -> Any:
    """Return `value` with every tensor replaced by zeros of its shape that take no memory."""
    tensors = [torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape) for t in leaves(value)]
    return Template(value).build(tensors)


def _strip(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _LEAF
    if isinstance(value, (tuple, list)):
        return type(value), None, [_strip(item) for item in value]
    if isinstance(value, dict):
        return type(value), list(value), [_strip(item) for item in value.values()]
    return None, value, None


def _build(node: Any, tensors: Iterator[Tensor]) -> Any:
    if node is _LEAF:
        return next(tensors)
    kind, keys, items = node
    if kind is None:
        return keys
    built = [_build(item, tensors) for item in items]
    if keys is not None:
        named = dict(zip(keys, built, strict=True))
        return named if kind is dict else kind(**named)
    if hasattr(kind, "_fields"):
        return kind(*built)
    return kind(built)

"""Look of a denoiser call: shapes and kinds of its arguments, without their values."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from torch import Tensor

from diffcache.attach.anatomy import Anatomy, is_time
from diffcache.attach.argument_digest import values_in

_CONTROL = re.compile("control|residual")


def signature_of(given: dict[str, Any], timestep: str | None) -> Any:
    """Return a hashable description of a call.

    Tensors count with shape, dtype and device, None and strings and whole numbers inside lists
    (skipped layers, image shapes) with their value, other numbers with their type. Features of a
    call stand in for those of another only if both look alike.

    Args:
        given: All arguments of the call by name.
        timestep: Name of the one that is left out; None for none.
    """
    parts: list[Any] = []
    for name, value in given.items():
        if name == timestep:
            continue
        if type(value) is Tensor:
            parts += (name, value.shape, value.dtype, value.device)
        else:
            plain = value is None or value is True or value is False
            parts += (name, value if plain else _look(value))
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
    """Return what a call is conditioned on, by path: what stays the same from step to step.

    Left out are the sample, the time and the outputs of control networks, which move with them.

    Args:
        given: All arguments of the call by name.
        anatomy: Anatomy of the model, which names its sample.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == anatomy.sample or _moves(name):
            continue
        if type(value) is Tensor or value is None:  # most are: the fast way
            found[name] = value if value is not None else (type(None), None)
        else:
            found.update(values_in(name, value))
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

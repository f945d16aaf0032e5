"""Compare a run with those that a method's tables were measured in."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffcache.features.base import Method
from diffcache.features.each import Each
from diffcache.features.tables import Tables


def tables_of(method: Method) -> list[Tables]:
    """Return the tables of a method and of the methods it is made of."""
    if isinstance(method, Each):
        return [tables for _, own in method.methods for tables in tables_of(own)]
    found: list[Tables] = []
    made: Any = method
    for entry in dataclasses.fields(made) if dataclasses.is_dataclass(made) else ():
        value = getattr(made, entry.name)
        if isinstance(value, Tables):
            found.append(value)
        elif isinstance(value, Method):
            found += tables_of(value)
    return found


def effective(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, `self` and defaults included; none of a call that will fail."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def other_guidance(tables: Sequence[Tables], call: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about guidance of a call, by name, that differs from `guidance` in the headers of tables."""
    for entry in tables:
        for name, made in (entry.header.get("guidance") or {}).items():
            if name in call and _plain(call[name]) != _plain(made):
                has = call[name]
                yield (
                    f"tables={entry!r} were measured with {name}={made!r}, this run has "
                    f"{name}={has!r}, so the cache may err more; calibrate again: "
                    f"diffcache.calibrate(pipe, method, prompts=[...], {name}={has!r})"
                )


def other_shape(tables: Sequence[Tables], shape: Sequence[int]) -> Iterator[str]:
    """Yield warnings about samples of another shape, without the batch, than `shape` in the headers of tables."""
    for entry in tables:
        made = entry.header.get("shape")
        if made and list(made) != list(shape):
            yield (
                f"tables={entry!r} were measured on samples of shape {list(made)}, this run has "
                f"{list(shape)}, so the cache may err more; calibrate again at this size: "
                "diffcache.calibrate(pipe, method, prompts=[...], height=..., width=...)"
            )


def _plain(value: Any) -> Any:
    """Return a setting of guidance as a header has it, numbers as floats."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return json.loads(json.dumps(value, default=repr))

"""Methods by name, for command lines; code imports the classes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diffcache.features.base import Method
from diffcache.features.combine import goes_in_place
from diffcache.features.parts.hold import Held
from diffcache.names import METHODS as METHODS
from diffcache.names import POLICIES, method_key, unknown


def method_class(name: str) -> type[Method]:
    """Return the class of a method by its catalogue name; "-" and "_" mean the same.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
    """
    place = (METHODS | POLICIES).get(method_key(name))
    if place is None:
        raise unknown(name, "method")
    module, cls = place.split(":")
    found: type[Method] = getattr(importlib.import_module(module), cls)
    return found


def make_method(method: str | Method, **settings: Any) -> Method:
    """Return a method from its catalogue name and settings; a method object is returned as it is.

    `hold="int8"`, `"bf16"` or `"host"` is a setting that every method has; see `Held`.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If a setting is unknown or out of its range.
        TypeError: If `method` is neither a name nor a method.
    """
    hold = settings.pop("hold", None)
    if hold is not None:
        return Held(make_method(method, **settings), hold)
    if isinstance(method, Method):
        if settings:
            raise ValueError(
                f"settings {sorted(settings)} go with a method's name, not with {method!r}"
            )
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method={method!r}: must be a name, such as 'taylorseer', or a method, such as "
            "TaylorSeer(); recipes for key-value caches go to diffcache.kv.cache_for"
        )
    cls = method_class(method)
    _check_known(cls, settings)
    return cls(**settings)


def changed(method: Method, settings: Mapping[str, Any]) -> Method:
    """Return a method with other settings at the same places, for some runs of a wrapped model.

    Raises:
        ValueError: If a setting is unknown or out of its range, or changes more than when a step is
            computed and what stands in for the others.
    """
    if isinstance(method, Held):
        return dataclasses.replace(method, method=changed(method.method, settings))
    _check_known(type(method), settings)
    new: Method = dataclasses.replace(method, **settings)  # type: ignore[type-var]
    if not goes_in_place(new, method):
        raise ValueError(
            f"{', '.join(settings)}: must change only when {type(method).__name__} computes and "
            "what stands in, not where or for how many steps; wrap anew for that"
        )
    return new


def _check_known(cls: type, settings: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__} has no setting {unknown[0]!r}; it has {', '.join(known)}")


def methods() -> dict[str, str]:
    """Return the names of all feature methods with one sentence each."""
    return _told(METHODS)


def policies() -> dict[str, str]:
    """Return the names of all policies for diffusion language models with one sentence each."""
    return _told(POLICIES)


def _told(names: Iterable[str]) -> dict[str, str]:
    return {name: (method_class(name).__doc__ or "").strip().split("\n")[0] for name in names}


def settings_of(make: Callable[..., Any]) -> str:
    """Return the settings of a method's class or a recipe's function, with their defaults."""
    own = inspect.signature(make).parameters.values()
    return ", ".join(
        each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in own
    )

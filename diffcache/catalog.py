"""The catalogue: method names for command lines; code imports the classes."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any

from diffcache.errors import UnknownMethodError
from diffcache.features.base import FeatureMethod
from diffcache.features.hold import Held

METHODS = {
    "interval": "diffcache.features.interval:Interval",
    "first-block": "diffcache.features.first_block:FirstBlock",
    "taylorseer": "diffcache.features.taylorseer:TaylorSeer",
    "confidence-gated-taylor": "diffcache.features.confidence_gated:ConfidenceGatedTaylor",
    "teacache": "diffcache.features.teacache:TeaCache",
    "magcache": "diffcache.features.magcache:MagCache",
    "dbcache": "diffcache.features.dbcache:DBCache",
    "seacache": "diffcache.features.seacache:SeaCache",
    "ertacache": "diffcache.features.ertacache:ERTACache",
    "fitted-forecast": "diffcache.features.fitted:FittedForecast",
    "bac": "diffcache.features.bac:BAC",
    "cachequant": "diffcache.features.cachequant:CacheQuant",
    "harmonica": "diffcache.features.harmonica:HarmoniCa",
    "profilingdit": "diffcache.features.profilingdit:ProfilingDiT",
    "regione": "diffcache.features.regione:RegionE",
    "temporal-table": "diffcache.features.temporal_table:TemporalTable",
    "tuned": "diffcache.features.tuned:Tuned",
}


def method_class(name: str) -> type[FeatureMethod]:
    """Return the class of a method by its catalogue name.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
    """
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(METHODS)}"
        raise UnknownMethodError(f"unknown method {name!r}; {hint}")
    module, cls = METHODS[name].split(":")
    found: type[FeatureMethod] = getattr(importlib.import_module(module), cls)
    return found


def make_method(method: str | FeatureMethod, **settings: Any) -> FeatureMethod:
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
    if isinstance(method, FeatureMethod):
        if settings:
            raise ValueError(
                f"settings {sorted(settings)} go with a method's name, not with {method!r}"
            )
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method={method!r}: must be a name, such as 'taylorseer', or a method, such as "
            "TaylorSeer()"
        )
    cls = method_class(method)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__} has no setting {unknown[0]!r}; it has {', '.join(known)}")
    return cls(**settings)


def methods() -> dict[str, str]:
    """Return the names of all methods with one sentence each."""
    return {name: (method_class(name).__doc__ or "").strip().split("\n")[0] for name in METHODS}

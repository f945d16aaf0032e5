"""Methods as plain data, so that a file can hold one and another process can make it again."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffcache.errors import TablesError
from diffcache.features.tables import Tables
from diffcache.step import Site

_PACKAGE = "diffcache.features."


def to_plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a method, part or setting as data that JSON can hold.

    Args:
        value: A method or part of `diffcache.features`, a number, text, None, or a sequence.
        tensors: Gets the tensors of tables in it, by names that the data refers to.

    Raises:
        ValueError: If there is something in it that cannot be made again, such as a class of
            yours.
    """
    if isinstance(value, Site):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [to_plain(item, tensors) for item in value]
    if isinstance(value, Tables):
        mark = f"{value.digest}/"
        tensors.update({mark + name: value[name] for name in value.names()})
        return {"tables": mark, "header": dict(value.header)}
    cls = type(value)
    if dataclasses.is_dataclass(value) and cls.__module__.startswith(_PACKAGE):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {
            "class": f"{cls.__module__.removeprefix(_PACKAGE)}:{cls.__qualname__}",
            "fields": {name: to_plain(field, tensors) for name, field in fields.items()},
        }
    raise ValueError(f"{value!r} cannot be written to a file: it is no part of diffcache.features")


def from_plain(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `to_plain` made data of.

    Only dataclasses of `diffcache.features` are made; nothing in a file is run.

    Raises:
        TablesError: If the data names anything else.
    """
    if isinstance(data, list):
        return tuple(from_plain(item, tensors) for item in data)
    if not isinstance(data, dict):
        return data
    if "float" in data:
        return float(data["float"])
    if "tables" in data:
        mark = data["tables"]
        own = {k.removeprefix(mark): t for k, t in tensors.items() if k.startswith(mark)}
        return Tables(data["header"], own)
    module, _, name = str(data.get("class")).partition(":")
    found = None
    if module.isidentifier() and name.isidentifier():
        try:
            found = getattr(importlib.import_module(_PACKAGE + module), name, None)
        except ModuleNotFoundError:
            found = None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise TablesError(f"{data.get('class')!r} is no class of diffcache.features")
    fields = {name: from_plain(value, tensors) for name, value in data["fields"].items()}
    return found(**fields)

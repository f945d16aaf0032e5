"""Methods as plain data, so that a file can hold one and another process can make it again."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from diffcache.errors import TablesError
from diffcache.features.schema import header_fault, shown
from diffcache.features.tables import Tables
from diffcache.step import Site

_PACKAGE = "diffcache.features."
_ROOMS = (_PACKAGE, f"{_PACKAGE}parts.")  # files name a module without its room


def to_plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a method, part or setting as data that JSON can hold; tensors of tables go into `tensors`.

    Raises ValueError if there is something in it that cannot be made again, such as a class of yours.
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
            "class": f"{cls.__module__.rpartition('.')[2]}:{cls.__qualname__}",
            "fields": {name: to_plain(field, tensors) for name, field in fields.items()},
        }
    raise ValueError(f"{value!r} cannot be written to a file: it is no part of diffcache.features")


def from_plain(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the object that `to_plain` made data of.

    Only dataclasses of `diffcache.features` are made, of values that fit their annotations; nothing
    in a file is run, and no other file is read. Raises TablesError if the data is anything else.
    """
    if isinstance(data, list):
        return tuple(from_plain(item, tensors) for item in data)
    if not isinstance(data, dict):
        return data
    if data.get("float") in ("inf", "-inf"):
        return float(data["float"])
    if isinstance(data.get("tables"), str):
        return _tables(data["tables"], data.get("header"), tensors)
    found, given = _class(data.get("class")), data.get("fields")
    if not isinstance(given, dict):
        raise TablesError(f"{found.__name__} with fields={shown(given)}: must be values by name")
    return _made(found, {name: from_plain(value, tensors) for name, value in given.items()})


def _tables(mark: str, header: Any, tensors: Mapping[str, Tensor]) -> Tables:
    """Return the tables whose tensors' names begin with a mark."""
    fault = header_fault(header)
    if fault:
        raise TablesError(fault)
    own = {k.removeprefix(mark): t for k, t in tensors.items() if k.startswith(mark)}
    return Tables(header, own)


def _made(found: type, fields: dict[str, Any]) -> Any:
    """Return a dataclass of fields that fit it."""
    known = get_type_hints(found)
    taken = {f.name: known[f.name] for f in dataclasses.fields(found) if f.init}
    for name, value in fields.items():
        if name not in taken:
            raise TablesError(f"{found.__name__} has no {shown(name)}")
        if not _fits(value, taken[name]):
            raise TablesError(f"{found.__name__} with {name}={shown(value)}: must be {taken[name]}")
    try:
        return found(**fields)
    except TablesError:
        raise
    except (TypeError, ValueError) as error:  # a field is missing, or out of its range
        raise TablesError(f"{found.__name__}: {error}") from error


def _class(name: Any) -> type:
    """Return the dataclass of `diffcache.features` of a name, `module:class`."""
    module, _, cls = str(name).partition(":")
    found = None
    if module.isidentifier() and cls.isidentifier():
        rooms = (room for room in _ROOMS if importlib.util.find_spec(room + module))
        place = next(rooms, None)
        found = getattr(importlib.import_module(place + module), cls, None) if place else None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise TablesError(f"{shown(name)} is no class of diffcache.features")
    return found


def _fits(value: Any, hint: Any) -> bool:
    """Return whether plain data fits an annotation; tables are never a file's name."""
    args = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        own = [arg for arg in args if arg is not str] if Tables in args else args
        return any(_fits(value, arg) for arg in own)
    if get_origin(hint) is Literal:
        return value in args
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        each = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(each) == len(value) and all(map(_fits, value, each))
    if hint in (int, float):
        number = isinstance(value, (int, hint)) and not isinstance(value, bool)
        return number and not math.isnan(value)
    return isinstance(value, hint if isinstance(hint, type) else ())

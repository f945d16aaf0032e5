"""Every setting of every class: which values are refused, and in which words.

`settings.txt` is the table: a line says of a class and a setting what is said of some values. It is
made by trying the same values for all of them; `python -m tests.test_settings --write` makes it anew,
and what changed in it is to be looked at.
"""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from diffcache.catalog import make_method
from diffcache.kv.recipes.by_name import recipe_function
from diffcache.registry import rows_of
from tests.dllm.cases import CASES
from tests.kv.examples import examples
from tests.kv.test_face import TABLES
from tests.video.cases import POLICIES

TABLE = Path(__file__).with_name("settings.txt")
KINDS = ("kv", "features", "video", "dllm", "quant", "offline")
NUMBERS = (-1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 7, 300, math.nan, True, "other")
WORDS = ("other", 3)
VALUE = re.compile(r"\b(\w+)=(?:'[^']*'|\([^()]*\)|[^,;:'( ]+)")


def parts(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Walk the settings objects that an example is made of."""
    if id(thing) in seen or len(seen) > 100_000:
        return
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        for each in thing:
            yield from parts(each, seen)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield thing
        for field in dataclasses.fields(thing):
            yield from parts(getattr(thing, field.name, None), seen)


def known() -> dict[str, Any]:
    """Return an object of every class of settings that there is, by kind and class."""
    methods = []
    for name, row in rows_of("method").items():
        try:
            methods.append(make_method(name, **row.skips or {}))
        except (ValueError, TypeError):  # needs tables that were measured
            continue
    recipes = [make() for make in examples().values()]
    found = {type(each): each for each in parts([recipes, methods, POLICIES, CASES], set())}
    for kind in KINDS:
        package = importlib.import_module(f"diffcache.{kind}")
        for place in pkgutil.walk_packages(package.__path__, f"diffcache.{kind}."):
            for cls in vars(importlib.import_module(place.name)).values():
                is_ours = inspect.isclass(cls) and cls.__module__ == place.name
                if not is_ours or not dataclasses.is_dataclass(cls) or cls in found:
                    continue
                try:
                    found[cls] = cls()
                except (TypeError, ValueError):  # no settings without a model
                    continue
    return {
        f"{cls.__module__.split('.')[1]} {cls.__name__}": one
        for cls, one in sorted(found.items(), key=lambda pair: f"{pair[0].__module__} {pair[0]}")
        if cls.__module__.startswith("diffcache.") and not cls.__name__.startswith("_")
    }


def tried(default: Any, annotation: str) -> tuple[Any, ...]:
    """Return the values that are tried in place of one."""
    if isinstance(default, (int, float)) or re.search(
        r"\b(int|float|Size|Count|Whole|Share|Change|Range)\b", annotation
    ):
        return NUMBERS if "tuple" not in annotation and "Tensor" not in annotation else ()
    return WORDS if isinstance(default, str) else ()


def complaint(make: Any, **settings: Any) -> str | None:
    """Return what is said of settings, or None if they are taken."""
    try:
        make(**settings)
    except ValueError as error:
        return str(error).split("\n")[0]
    except TypeError:  # annotations say of what type a value is
        return None
    return None


def rows() -> Iterator[tuple[str, str, Any, str, Callable[..., Any]]]:
    """Find every setting: row, name, a value that is taken, its type and what makes the object."""
    for row, one in known().items():
        for field in dataclasses.fields(one):
            if field.init:
                value, kind = getattr(one, field.name), str(field.type)
                yield row, field.name, value, kind, partial(dataclasses.replace, one)
    for row in rows_of("recipe"):
        function, tables = recipe_function(row), TABLES.get(row, {})
        for name, setting in inspect.signature(function).parameters.items():
            if name not in tables:
                kind, make = str(setting.annotation), partial(function, **tables)
                yield f"recipe {row}", name, setting.default, kind, make


def lines() -> list[str]:
    """Return the table."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row, name, default, kind, make in rows():
        for value in tried(default, kind):
            words = complaint(make, **{name: value})
            if words is not None:
                key = row, name, VALUE.sub(r"\1=..", words)
                found.setdefault(key, []).append(repr(value))
    return [f"{row} {name}: {', '.join(values)}: {words}" for (row, name, words), values in found.items()]


def test_settings_are_refused_in_the_words_of_the_table() -> None:
    now, table = lines(), TABLE.read_text().splitlines()
    changed = [f"+{row}" for row in now if row not in table]
    changed += [f"-{row}" for row in table if row not in now]
    assert not changed, "\n".join([*changed[:20], "python -m tests.test_settings --write"])
    for row in now:  # a recipe's parts may call a setting something else
        place, _, said = row.split(": ", 2)
        assert not row.startswith("recipe ") or f"{place.split()[-1]}=" in said, row


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    TABLE.write_text("\n".join(lines()) + "\n")

"""A sweep: many evaluations written down in one TOML or YAML file.

    model = "sticker-flux"
    samples = 1000
    steps = [28, 50]              # a list: one run for each value

    [[method]]
    name = "taylorseer"
    every = [3, 4, 5]             # a list: one row for each combination
    order = [1, 2]

A value that is itself a list is written in a list of one: `computed = [[0, 4, 9]]`.
"""

from __future__ import annotations

import itertools
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from diffcache.errors import DiffcacheError, MissingError
from diffcache.eval.methods import make_row
from diffcache.eval.runs.evaluate import Plan
from diffcache.eval.runs.peers import Peer
from diffcache.eval.runs.task import Task, digest
from diffcache.features.base import Method

_TASK = {item.name for item in fields(Task)}
_PLAN = {"rounds", "memory", "reference", "resize", "convention", "stages", "reward"}
_TOP = _TASK | _PLAN | {"method"}
_TEXTS = {"model", "prompts", "dtype", "device", "reference", "convention", "reward"}
_FLAGS = {"memory"}
MOST = 10_000  # combinations of lists; more are taken for a mistake


def read_sweep(file: Path, out: Path, instead: Mapping[str, Any] | None = None) -> list[Plan]:
    """Read a sweep; return one plan for each combination of the task's lists.

    Args:
        file: TOML or YAML.
        out: Folder of the runs; each gets a folder of its own in it.
        instead: Keys and values that replace those of the file; None for none.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, or a key or a value in it is wrong.
        MissingError: If the library of a row is not installed.
    """
    found = {**read_values(file), **(instead or {})}
    unknown = sorted(set(found) - _TOP)
    if unknown:
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; use {', '.join(sorted(_TOP))}")
    if "model" not in found:
        raise ValueError(f"{file}: 'model' is missing")
    _check_values(file, found, set(instead or {}))
    methods = dict(_methods(file, found.pop("method", [])))
    settings = {name: found.pop(name) for name in _PLAN & set(found)}
    if settings.get("reference"):
        settings["reference"] = file.parent / settings["reference"]
    plans = []
    for values in _combinations(found, sweeps=lambda name: name != "call"):
        try:
            task = Task(**values)
            command = shlex.join(["diffcache", *sys.argv[1:]])
            folder = out / _folder(file, found, values)
            plans.append(Plan(task, methods, folder, command=command, **settings))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error
    return plans


def _check_values(file: Path, found: Mapping[str, Any], said: Set[str]) -> None:
    """Raise ValueError for a value of a wrong type, or for code that a file names.

    `said` are keys that the user gave, which may name code.
    """
    for name, value in found.items():
        swept = isinstance(value, list) and name in _TASK
        for one in value if swept else [value]:
            if name in _TEXTS and not isinstance(one, str):
                raise ValueError(f"{file}: {name}={one!r}: must be text")
            if name in _FLAGS and not isinstance(one, bool):
                raise ValueError(f"{file}: {name}={one!r}: must be true or false")
        if swept and not value:
            raise ValueError(f"{file}: {name}=[]: a list of nothing leaves nothing to run")
    if ":" in found.get("reward", "") and "reward" not in said:
        raise ValueError(
            f"{file}: reward={found['reward']!r}: names code, which a file may not; say it on the "
            f"command line: --reward {found['reward']}"
        )


def read_values(file: Path) -> dict[str, Any]:
    """Return the keys and values of a sweep as they are written.

    Raises FileNotFoundError if there is no such file, and ValueError if it cannot be read.
    """
    if not file.exists():
        raise FileNotFoundError(f"no sweep at {file}")
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".toml":
            found = _toml(text)
        elif file.suffix in (".yaml", ".yml"):
            import yaml

            found = yaml.safe_load(text)
        else:
            raise ValueError("a sweep is a .toml or a .yaml file")
    except Exception as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"cannot read {file}: it must hold keys and values, such as model")
    return found


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    found: dict[str, Any] = tomllib.loads(text)
    return found


def _methods(file: Path, tables: Any) -> Iterator[tuple[str, Method | Peer]]:
    """Yield name in the table and method, for every combination of the lists of every table."""
    seen = set()
    for called, values in settings_of(file, tables):
        said = ",".join(f"{key}={value}" for key, value in values.items())
        name = f"{called}:{said}" if said else called
        if name in seen:
            raise ValueError(f"{file}: {name} stands there twice")
        seen.add(name)
        try:
            yield name, make_row(called, **values)
        except MissingError as error:
            raise MissingError(f"{file}: {name}: {error}") from error
        except (DiffcacheError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: {name}: {error}") from error


def settings_of(file: Path, tables: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and settings of every row of a sweep, whose method is not made yet.

    `tables` is its `method`. Raises ValueError if it is no list, or a name is missing.
    """
    if not isinstance(tables, list):
        raise ValueError(f"{file}: method={tables!r}: must be a list, in TOML [[method]]")
    for table in tables:
        table = {"name": table} if isinstance(table, str) else table
        if not isinstance(table, Mapping) or "name" not in table:
            raise ValueError(f"{file}: a [[method]] needs a name; got {table!r}")
        settings = {key: value for key, value in table.items() if key != "name"}
        yield from ((str(table["name"]), values) for values in _combinations(settings))


def _combinations(values: Mapping[str, Any], sweeps: Any = lambda name: True) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values that are lists."""
    columns = [value if isinstance(value, list) and sweeps(name) else [value] for name, value in values.items()]
    count = math.prod(map(len, columns))
    if count > MOST:
        raise ValueError(f"lists of a sweep have {count:,} combinations; most are {MOST:,}")
    for chosen in itertools.product(*columns):
        yield dict(zip(values, chosen, strict=True))


def _folder(file: Path, given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return the name of a run's folder, from the file and the swept values."""
    swept = [name for name, value in given.items() if isinstance(value, list)]
    said = "-".join(f"{name}-{Path(str(values[name])).name}" for name in swept)
    # Two sweeps of one name must not meet in one folder.
    rest = {k: v for k, v in values.items() if k != "samples"}
    return "-".join(part for part in (file.stem, said, digest(rest)[:6]) if part)

"""Every denoiser class of diffusers that has a tiny case, read from `cases.toml`."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.zoo.built_inputs import BUILT
from tests.zoo.case import Case, Inputs
from tests.zoo.draw import given, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("cases.toml")
INHERITED = ("blocks", "latents", "rising", "span", "timestep", "times")  # by `like`


def cases() -> dict[str, Case]:
    """Return the cases whose class the installed diffusers has, by name."""
    import diffusers

    exported = set(dir(diffusers))
    return {name: case for name, case in _all_cases().items() if case.cls in exported}


@cache
def _all_cases() -> dict[str, Case]:
    tables: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(FILE.read_text(encoding="utf-8")).items():
        tables[name] = _after(tables.get(table.get("like", ""), {}), table)
    return {name: _case(name, table) for name, table in tables.items()}


def _after(before: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with what it takes over from the one before."""
    made = {key: value for key, value in before.items() if key in INHERITED} | table
    made["config"] = before.get("config", {}) | table.get("config", {})
    inputs = table.get("inputs", {})
    made["inputs"] = inputs if isinstance(inputs, str) else before.get("inputs", {}) | inputs
    return made


def _case(name: str, table: dict[str, Any]) -> Case:
    fields = {key: _tuples(table[key]) for key in (*INHERITED, "short") if key in table}
    extras = {key: _inputs(value) for key, value in table.get("extras", {}).items()}
    return Case(
        name, name.partition("-")[0], read(_tuples(table["config"])), _inputs(table["inputs"]), extras=extras, **fields
    )


def _inputs(said: Any) -> Inputs:
    """Return what makes arguments: a table of them, a function by name, or one that is called."""
    if isinstance(said, dict):
        return given(**read(said))
    made: Inputs = BUILT[said] if said in BUILT else read(said)
    return made


def _tuples(value: Any) -> Any:
    """Return a value with tuples for lists, as configurations have them; "list(...)" stays one."""
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

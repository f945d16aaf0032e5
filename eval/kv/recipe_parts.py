"""Parts that a recipe is put together from, in a few words."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffcache.kv.codec.remat import Projections
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.merging.lococo import MixWeights
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.learned import RetainingHeads

PARTS = ("score", "budget", "plan", "merge", "codec", "ladder", "retrieve", "trigger")
_SHOWN = (bool, int, float, str)
_LONGEST = 3  # elements of a tuple that is written out


def _bases() -> list[Bases]:
    return [Bases(*(torch.zeros(2, 2) for _ in range(4)))]


# Settings without defaults -> a stand-in that makes a recipe of the same parts.
_TABLES: Mapping[str, Callable[[], Any]] = {
    "heads": lambda: ((True, False),),
    "channels": lambda: (((0, 1),),),
    "bases": _bases,
    "scales": lambda: ((1, 1), (2, 2)),
    "projections": lambda: [Projections(torch.zeros(2, 2), torch.zeros(2, 2), 1)],
}
_OF_METHOD: Mapping[tuple[str, str], Callable[[], Any]] = {
    ("lococo", "weights"): lambda: MixWeights(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1), torch.zeros(1)),
    ("locret", "heads"): lambda: RetainingHeads(torch.zeros(1, 3, 1), torch.zeros(1, 1, 1)),
}


def example(function: Callable[..., Recipe]) -> Recipe:
    """Return a recipe with its defaults, and stand-ins for tables that are found offline.

    Raises ValueError if it needs something else.
    """
    given = {}
    for setting, about in inspect.signature(function).parameters.items():
        if about.default is not inspect.Parameter.empty:
            continue
        make = _OF_METHOD.get((function.__name__, setting)) or _TABLES.get(setting)
        if make is None:
            raise ValueError(f"{function.__name__} needs {setting}: put a stand-in into {__name__}")
        given[setting] = make()
    return function(**given)


def composition(recipe: Recipe) -> str:
    """Return a description of the parts of a recipe."""
    found = []
    for name in PARTS:
        part = getattr(recipe, name)
        if part is not None and part != ():
            found.append(f"{name} `{spelled(part)}`")
    if recipe.space == "pre":
        found.append("keys held unrotated")
    if recipe.positions is not None:
        found.append(f"positions `{spelled(recipe.positions)}`")
    if recipe.skip:
        found.append(f"skips {recipe.skip} layers")
    return "; ".join([*found, while_decoding(recipe)])


def while_decoding(recipe: Recipe) -> str:
    """Return whether the cache grows with the tokens that are generated, in words."""
    return "bounded while decoding" if recipe.bounded else "grows while decoding"


def spelled(part: Any) -> str:
    """Return a part as a Python expression, without defaults, tensors and long tables."""
    if isinstance(part, tuple):
        return ", ".join(dict.fromkeys(map(spelled, part)))
    if not dataclasses.is_dataclass(part):
        return type(part).__name__
    inside = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        several = value if isinstance(value, tuple) else (value,)
        if _is_default(field, value):
            continue
        if several and all(map(dataclasses.is_dataclass, several)):
            inside.append(spelled(value))
        elif len(several) <= _LONGEST and all(isinstance(each, _SHOWN) for each in several):
            inside.append(f"{field.name}={value!r}")
    name = type(part).__name__
    return f"{name}({', '.join(inside)})" if inside else name


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if isinstance(value, Tensor) or field.default is dataclasses.MISSING:
        return False
    return bool(type(field.default) is type(value) and field.default == value)

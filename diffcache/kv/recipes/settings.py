"""The settings of recipes: types that carry a range, checked under the names a user writes.

Parts check their own numbers too, by the names that they have there: `size` for `budget`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, Union, get_args, get_origin, get_type_hints

from diffcache.kv.budget import Size, check_size
from diffcache.kv.codec.pack import CHUNKS
from diffcache.kv.recipe import Recipe

P = ParamSpec("P")


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have.

    Args:
        least: The smallest, or what all are above.
        most: The largest.
        above: `least` itself is left out.
    """

    least: float
    most: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least} and at most {self.most}"
        return f"of at least {self.least}" + (f" and at most {self.most}") * (self.most < math.inf)


class OneOf(tuple[float, ...]):
    """The few numbers that a setting may have."""

    __slots__ = ()

    def __str__(self) -> str:
        return "out of " + ", ".join(f"{value:g}" for value in self)


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
SomeShare = Annotated[float, Range(0, 1, above=True)]
Bits = Annotated[float, OneOf(CHUNKS)]


def checked(make: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Return a recipe's function that checks its settings by their annotations first.

    Numbers, choices (`Literal`) and single classes are checked; tables are left to the parts.

    Raises:
        ValueError: By what is returned, if a setting is not what its annotation says.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def checking(*args: P.args, **kwargs: P.kwargs) -> Recipe:
        hints = _hints(make)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = value = _plain(value)
            check_setting(name, value, hints[name])
        return make(*bound.args, **bound.kwargs)

    return checking


def _plain(value: Any) -> Any:
    """Return a number of numpy or another library as one of Python."""
    if isinstance(value, (bool, int, float)):
        return float(value) if isinstance(value, float) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


@functools.cache
def _hints(make: Callable[..., Recipe]) -> dict[str, Any]:
    return get_type_hints(make, include_extras=True)


def check_setting(name: str, value: object, hint: Any) -> None:
    """Raise unless a value is what an annotation says.

    Raises:
        ValueError: If it is not.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    if hint == Size:
        check_size(name, value)
        return
    kind, *more = (kind for kind in kinds if kind is not NoneType)
    if more:
        return
    limits: Any = None
    if get_origin(kind) is Annotated:
        kind, limits = get_args(kind)
    none = " or None" if NoneType in kinds else ""
    if kind in (int, float):
        _check_number(name, value, kind, limits, none)
    elif get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            choices = " or ".join(map(repr, get_args(kind)))
            raise ValueError(f"{name}={value!r}: must be {choices}{none}")
    elif get_origin(kind) in (tuple, Sequence) and not isinstance(value, (tuple, list)):
        raise ValueError(f"{name}={value!r}: must be a tuple or a list{none}")
    # On Python 3.10 `tuple[int, ...]` passes for a type.
    elif not get_origin(kind) and isinstance(kind, type) and not isinstance(value, kind):
        what = "True or False" if kind is bool else f"a {kind.__name__}"
        raise ValueError(f"{name}={value!r}: must be {what}{none}")


def _check_number(name: str, value: Any, kind: type, limits: Any, none: str) -> None:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (limits is not None and value not in limits):
        what = "a whole number" if kind is int else "a number"
        allowed = "" if limits is None else f" {limits}"
        raise ValueError(f"{name}={value!r}: must be {what}{allowed}{none}")


def check_room(budget: Size, always: Mapping[str, int]) -> None:
    """Raise if a number of slots leaves none to choose beside those that are always read.

    A share is looked at when it is used: how many slots it is depends on the text.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        always: Numbers of slots that are always read, by the name of the setting behind each.

    Raises:
        ValueError: If it leaves none.
    """
    if isinstance(budget, int) and budget <= sum(always.values()):
        why = ", ".join(f"{name}={count}" for name, count in always.items())
        raise ValueError(
            f"budget={budget}: must be above the {sum(always.values())} slots that are always "
            f"read ({why}), or nothing is chosen; give more, or make those fewer"
        )


def check_multiple(name: str, value: int, group: int) -> None:
    """Raise unless a number of tokens is a multiple of those that are coded together.

    Raises:
        ValueError: If it is not.
    """
    if value % group:
        raise ValueError(
            f"{name}={value}: must be a multiple of group={group}, the tokens coded together"
        )

"""Settings of methods, policies, recipes and their parts: types that carry a range, checked by their names."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

P = ParamSpec("P")
Made = TypeVar("Made")
Size = int | float  # a count, or a share


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have.

    Args:
        least: The smallest, or what all are above.
        most: The largest, or what all are below.
        above: `least` itself is left out.
        below: `most` itself is left out.
        endless: Infinity is a number, too.
    """

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    endless: bool = False

    def __contains__(self, value: float) -> bool:
        left_out = (self.above and value == self.least) or (self.below and value == self.most)
        return self.least <= value <= self.most and not left_out

    def __str__(self) -> str:
        if self.least == -math.inf:
            return ""
        start = f"above {self.least}" if self.above else f"of at least {self.least}"
        if self.most == math.inf:
            return start
        return f"{start} and {'below' if self.below else 'at most'} {self.most}"


@dataclass(frozen=True)
class Limit:
    """The values that a setting may have: those of which something holds, and how that is said."""

    holds: Callable[[Any], bool]
    said: str

    def __contains__(self, value: Any) -> bool:
        return self.holds(value)

    def __str__(self) -> str:
        return self.said


def one_of(*values: float) -> Limit:
    """Return the limit to a few numbers."""
    return Limit(values.__contains__, "out of " + ", ".join(f"{value:g}" for value in values))


class Such(str):
    """An example of the objects that a setting may be."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True

    def __str__(self) -> str:
        return f"such as {super().__str__()}"


Count = Annotated[int, Range(1)]
Several = Annotated[int, Range(2)]
Odd = Annotated[int, Limit(lambda x: x >= 1 and x % 2 == 1, "that is odd and at least 1")]
Whole = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
SomeShare = Annotated[float, Range(0, 1, above=True)]
Factor = Annotated[float, Range(1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Cosine = Annotated[float, Range(-1, 1)]
FloatType = Annotated[torch.dtype, Limit(lambda x: x.is_floating_point, "of floats")]
Mode = Literal["paper", "official"]


class Settings:
    """Settings of a method, a policy or a part of one: a frozen dataclass.

    Numbers, choices (`Literal`) and single classes are checked by their annotations, what these
    cannot say by `check`; a setting that is refused raises ValueError.
    """

    def __post_init__(self) -> None:
        made: Any = type(self)
        hints = _hints(made)
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if each.init:
                value = _plain(getattr(self, each.name))
                check_setting(each.name, value, hints.get(each.name, Any))
                object.__setattr__(self, each.name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError unless settings go together."""


def checked(make: Callable[P, Made]) -> Callable[P, Made]:
    """Return a recipe's function that checks its settings by their annotations first.

    Numbers, choices (`Literal`) and single classes are checked; tables are left to the parts.

    Raises:
        ValueError: By what is returned, if a setting is not what its annotation says.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def checking(*args: P.args, **kwargs: P.kwargs) -> Made:
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
def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(make, include_extras=True)
    except NameError:  # a class of a user's, whose annotations name what is not imported
        return {}


def check_size(name: str, size: object) -> None:
    """Raise unless it is a number of slots or a share of the tokens.

    A whole number is a count, from 2 on, and a float a share, 1.0 being everything. 1 is refused:
    other programs' JSON writes it for 1.0, and a single slot is of little use.

    Raises:
        ValueError: If it is neither.
    """
    is_share = isinstance(size, float) and 0 < size <= 1
    is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 2
    if not (is_share or is_count):
        hint = "; write 1.0 for everything" if type(size) is int and size == 1 else ""
        raise ValueError(
            f"{name}={size!r}: must be a count, a whole number of at least 2, or a share, a float "
            f"above 0 and at most 1.0{hint}"
        )


def check_setting(name: str, value: object, hint: Any) -> None:
    """Raise ValueError unless a value is what an annotation says."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    if hint == Size:
        check_size(name, value)
        return
    kind, *more = (kind for kind in kinds if kind is not NoneType)
    if more or kind is Any:
        return
    limits, why = None, ""
    if get_origin(kind) is Annotated:
        kind, limits, *words = get_args(kind)
        why = "".join(words)
    wanted = _wanted(value, kind, limits)
    if wanted is not None:
        none = " or None" if NoneType in kinds else ""
        raise ValueError(f"{name}={value!r}: must be {wanted}{none}{why}")


def _wanted(value: Any, kind: Any, limits: Any) -> str | None:
    """Return what a value must be, or None if that is what it is."""
    allowed = "" if limits is None else f" {limits}".rstrip()
    origin = get_origin(kind)
    if kind in (int, float):
        known = isinstance(value, (int, kind)) and not isinstance(value, bool)
        known = known and (abs(value) < math.inf or (value == value and getattr(limits, "endless", False)))
        if known and (limits is None or value in limits):
            return None
        return ("a whole number" if kind is int else "a number") + allowed
    if origin is Literal:
        choices = get_args(kind)
        known = isinstance(value, str) and value in choices
        return None if known else " or ".join(map(repr, choices))
    if origin in (tuple, Sequence):
        if not isinstance(value, (tuple, list)):
            return "a tuple or a list"
        return None if _nested(value, kind) else "of the form " + re.sub(r"(\w+\.)+(?=\w)", "", str(kind))
    # On Python 3.10 `tuple[int, ...]` passes for a type.
    if origin or not isinstance(kind, type):
        return None
    if isinstance(value, kind) and (limits is None or value in limits):
        return None
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return "True or False" if kind is bool else f"{article} {kind.__name__}{allowed}"


def _nested(value: Any, kind: Any) -> bool:
    """Return whether a table has the levels that its annotation says, numbers or objects of a class at the last."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _nested(value, inner[0])
    if origin in (Union, UnionType):
        return any(_nested(value, each) for each in inner)
    if origin in (tuple, Sequence):
        if isinstance(value, str) or not hasattr(value, "__len__"):
            return False
        endless = origin is Sequence or inner[-1] is Ellipsis
        each = inner[:1] * len(value) if endless else inner
        return len(each) == len(value) and all(map(_nested, value, each))
    if kind in (bool, int, float):
        return hasattr(value, "__float__")
    return not isinstance(kind, type) or isinstance(value, kind)

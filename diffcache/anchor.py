"""Link a touched object to its engine, in a way that no copy inherits."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, TypeVar

ATTRIBUTE = "_diffcache"
_LONGEST = 120  # characters of a method in an error
Self = TypeVar("Self", bound="Attached")


class Attached(ABC):
    """Hold of a cache on a model, pipeline or video: a context manager that detaches it at its end.

    Attributes:
        method: Method, recipe or policy that was put on the object.
    """

    method: Any

    @abstractmethod
    def check_idle(self) -> None:
        """Raise AttachError if another thread or task is in the midst of using it."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the held tensors."""

    @abstractmethod
    def detach(self) -> None:
        """Leave everything as it was found; detaching twice does nothing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def described(owner: Any) -> str:
    """Describe an attachment in an error: a recipe has more parts than a line holds."""
    handle = owner if isinstance(owner, Attached) else getattr(owner, "handle", owner)
    if not hasattr(handle, "method"):
        return "another cache"
    method = handle.method
    whole = repr(method)
    short = f"{type(method).__name__} {getattr(method, 'name', '')!r}"
    return whole if len(whole) <= _LONGEST else short


class Loop(ABC):
    """An object that calls a network in a loop of its own, and is wrapped in its place."""

    @property
    @abstractmethod
    def network(self) -> Any:
        """The network."""


class Anchor:
    """A link from one object to its owner; copies and pickles of the object get a dead one."""

    __slots__ = ("of", "owner")

    def __init__(self, of: Any = None, owner: Any = None) -> None:
        self.of = weakref.ref(of) if of is not None else None
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Anchor:
        return Anchor()

    def __copy__(self) -> Anchor:
        return Anchor()

    def __reduce__(self) -> tuple[Any, ...]:
        return Anchor, ()


def claim(of: Any, owner: Any) -> None:
    """Make `owner` the owner of `of`."""
    of.__dict__[ATTRIBUTE] = Anchor(of, owner)


def owner_of(of: Any) -> Any:
    """Return the owner of `of`, None for an object that is not claimed or is a copy."""
    anchor: Anchor | None = getattr(of, "__dict__", {}).get(ATTRIBUTE)
    if anchor is None or anchor.of is None or anchor.of() is not of:
        return None
    return anchor.owner


def release(of: Any) -> None:
    """Forget the owner of `of`."""
    of.__dict__.pop(ATTRIBUTE, None)


def _rebuild(base: Any) -> Any:
    return base.__new__(base)


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    state = {key: value for key, value in self.__dict__.items() if key != ATTRIBUTE}
    return _rebuild, (type(self).__mro__[1],), state


def subclass(base: type, **members: Any) -> type:
    """Return a subclass of `base` under its own name that copies and pickles as `base`."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        **members,
    }
    return type(base)(base.__name__, (base,), namespace)

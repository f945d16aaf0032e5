"""Read a method with its settings from one word of a command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from diffcache.catalog import make_method
from diffcache.errors import TablesError, UnknownMethodError
from diffcache.features.base import Method, check_int
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Listed
from diffcache.registry import read_word
from diffcache.settings_file import is_settings_file

if TYPE_CHECKING:
    from diffcache.eval.runs.peers import Peer

Made = TypeVar("Made")
EVEN = "even"


def parse_method(text: str) -> Method:
    """Return the method that `name` or `name:key=value,key=value` stands for.

    A value is Python where it can be read so, else text: `taylorseer:every=4,site=module`.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If a setting cannot be read, is unknown, given twice, missing, or out of its range.
    """
    return _read(text, make_method)


def parse_row(text: str) -> Method | Peer:
    """Return the contender of an evaluation's row: a method, or a cache of another library.

    `text` is a method as `parse_method` takes it, or `diffusers/name:key=value,key=value`,
    `cache-dit/dbcache:key=value`, or `even:computed=13,steps=20`.

    Raises:
        UnknownMethodError: If there is no such name.
        MissingError: If the library of the cache is not installed.
        ValueError: If a setting is wrong, as in `parse_method`.
    """
    return _read(text, make_row)


def rows_of(methods: Sequence[Any] | Mapping[str, Any]) -> dict[str, Method | Peer]:
    """Return the contenders by their names in the table.

    They are words as `parse_row` takes them, or methods; or a mapping from the names of rows. Raises ValueError if a
    method is given twice, or a word cannot be read, as in `parse_row`.
    """
    pairs = methods.items() if isinstance(methods, Mapping) else ((str(m), m) for m in methods)
    found: dict[str, Method | Peer] = {}
    for name, method in pairs:
        if name in found:
            raise ValueError(f"method {name!r} is given twice")
        found[name] = parse_row(method) if isinstance(method, str) else make_method(method)
    return found


def even(computed: int, steps: int, site: str = "stack") -> Combine:
    """Return reuse between steps at even distances, for any number of steps.

    `Interval` computes one step in a whole number; this is compared with a method that computes any share of a run.
    The first step is among the `computed` ones of `steps`. Raises ValueError if a number is no whole one, or
    `computed` is more than `steps`.
    """
    check_int("steps", steps, 1)
    check_int("computed", computed, 1)
    if computed > steps:
        raise ValueError(f"computed={computed}: must be 1 to steps={steps}")
    return Combine(Listed([i * steps // computed for i in range(computed)], steps), Reuse(), site)


def make_row(name: str, **settings: Any) -> Method | Peer:
    """Return a method of the catalogue, a cache of another library, or `even`, by name."""
    if name == EVEN:
        return even(**settings)
    if "/" in name and not is_settings_file(name):
        from diffcache.eval.runs.peers import make_peer  # imports diffusers

        return make_peer(name, settings)
    return make_method(name, **settings)


def _read(text: str, make: Callable[..., Made]) -> Made:
    """Return the result of `make` for one word's name and settings; its errors name the word."""
    name, settings = read_word(text)
    with naming(f"method {text!r}"):
        return make(name, **settings)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what`, such as `method 'taylorseer:every=0'`, before errors; turn a TypeError into a ValueError."""
    try:
        yield
    except (UnknownMethodError, TablesError) as error:
        raise type(error)(f"{what}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{what}: {error}") from error

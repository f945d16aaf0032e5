"""Base class of all methods: settings, and the abilities that it asks of the attachment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, cast

from diffcache.registry import name_of


@cache
def _citations() -> dict[str, str]:
    """Return the entries of `citations.bib` by the names of methods and policies."""
    text = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in text.split("\n% ")[1:])
    return {name: entry.strip() for names, _, entry in parts for name in names.split(", ")}


class Name:
    """The name of a class, from its row of the registry."""

    def __get__(self, instance: object, owner: type) -> str:
        """Return the name."""
        return name_of(owner)


class Citation:
    """The BibTeX entry of a class, by its `name`; empty where `citations.bib` has none."""

    def __get__(self, instance: object, owner: Any) -> str:
        """Return the entry."""
        return _citations().get(owner.name, "")


class Ability:
    """Something a method asks of the attachment, such as feature reuse (`Combine`).

    A frozen dataclass of settings. The attachment has an extension for every class of ability of this project; others
    name theirs.

    Attributes:
        extension: `module:function` that makes the extension of (denoiser, ability), for abilities from elsewhere.
    """

    extension: ClassVar[str] = ""


class Method(ABC):
    """A method: a frozen dataclass whose fields are its configuration.

    A method names all that it needs of the attachment in `abilities`, and
    never sees a module. `repr(method)` is valid Python.

    Attributes:
        name: Name in the catalogue; by default that of the registry.
        bibtex: BibTeX entry of what it comes from, to cite it; by default that of `citations.bib`.
        counts_calls: Whether every call of the network is a step of its run. Networks without a
            timestep, such as language models, have no other clock.
        note: Further remark of its reports.
        publishes: Name of a model in `presets.published.models()` -> the settings that were
            published for it; the method then has a field `model`, and `published`.
    """

    name: ClassVar[str] = cast(str, Name())
    bibtex: ClassVar[str] = cast(str, Citation())
    counts_calls: ClassVar[bool] = False
    note: ClassVar[str] = ""
    publishes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    def total(self) -> int | None:
        """Length in steps of the runs it is made for, None for any; other runs are refused."""
        return None

    @abstractmethod
    def abilities(self) -> tuple[Ability, ...]:
        """Return the abilities of the method, in the order in which they take part.

        Raises:
            ValueError: If a field is out of its range.
        """

    def for_denoiser(self, denoiser: str) -> Method:
        """Return the method of one denoiser of a pipeline, by its name there."""
        return self

    def check_model(self, facts: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise unless the method fits the model and scheduler it is about to be attached to.

        Args:
            facts: Facts about them: `model` (class name), `config` (hash of the model's configuration), `scheduler`
                (class name, None for a bare model), `scheduler_config` (its settings), `settings` (the model's
                configuration), `pipeline` (class name, None for a bare model) and `folder` (the end of where the model
                was loaded from).

        Raises:
            AttachError: If its tables were made for another model or scheduler.
        """


class Configuration(Protocol):
    """Configuration of a cache as another library has it, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def check_int(name: str, value: object, least: int, hint: str = "") -> None:
    """Raise ValueError unless `value` is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}{hint}")


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an int or a float, infinity and NaN included; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)

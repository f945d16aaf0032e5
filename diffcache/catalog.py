"""Methods by name, for command lines; code imports the classes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diffcache.features.base import Method
from diffcache.features.combine import goes_in_place
from diffcache.features.parts.hold import Held
from diffcache.names import METHODS as METHODS
from diffcache.names import POLICIES, method_key, unknown

_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""


def method_class(name: str) -> type[Method]:
    """Return the class of a method by its catalogue name; "-" and "_" mean the same.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
    """
    place = (METHODS | POLICIES).get(method_key(name))
    if place is None:
        raise unknown(name, "method")
    module, cls = place.split(":")
    found: type[Method] = getattr(importlib.import_module(module), cls)
    return found


def make_method(
    method: str | Method, facts: Callable[[], Mapping[str, Any]] | None = None, **settings: Any
) -> Method:
    """Return a method from its catalogue name and settings; a method object is returned as it is.

    `hold="int8"`, `"bf16"` or `"host"` is a setting that every method has; see `Held`. With
    `model="flux.1-dev"` the settings that are not given are those published for that model.

    Args:
        method: A method, or its name; settings may follow it as on the command line,
            `taylorseer:every=4`.
        facts: Returns facts about the model that it is for, as `Method.check_model` has them;
            without tables a method then takes the settings published for that model, if any are.
        **settings: Settings of a method given by name.

    Raises:
        AttachError: If the model may be one of several that settings were published for.
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If a setting is unknown or out of its range.
        TypeError: If `method` is neither a name nor a method.
    """
    hold = settings.pop("hold", None)
    if hold is not None:
        return Held(make_method(method, facts, **settings), hold)
    if isinstance(method, Method):
        if settings:
            raise ValueError(
                f"settings {sorted(settings)} go with a method's name, not with {method!r}"
            )
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method={method!r}: must be a name, such as 'taylorseer', or a method, such as "
            "TaylorSeer(); recipes for key-value caches go to diffcache.kv.cache_for"
        )
    if set(method) & set(":="):
        name, own = read_word(method)
        twice = sorted(own.keys() & settings.keys())
        if twice:
            raise ValueError(f"method {method!r}: {twice[0]} is given twice")
        return make_method(name, facts, **own, **settings)
    made: Method = _made(method_class(method), facts, settings)
    return made


def _made(cls: Any, facts: Callable[[], Mapping[str, Any]] | None, settings: dict[str, Any]) -> Any:
    """Return a method of a class, with published settings where a model's are asked for."""
    _check_known(cls, settings)
    if cls.publishes and not {"tables", cls.numbers} & settings.keys():
        if facts is not None and "model" not in settings:
            settings = {**settings, "model": cls.published_for(facts())}
        if settings.get("model"):
            return cls.published(settings["model"], **settings)
    return cls(**settings)


def changed(method: Method, settings: Mapping[str, Any]) -> Method:
    """Return a method with other settings at the same places, for some runs of a wrapped model.

    Raises:
        ValueError: If a setting is unknown or out of its range, or changes more than when a step is
            computed and what stands in for the others.
    """
    if isinstance(method, Held):
        return dataclasses.replace(method, method=changed(method.method, settings))
    _check_known(type(method), settings)
    new: Method = dataclasses.replace(method, **settings)  # type: ignore[type-var]
    if not goes_in_place(new, method):
        raise ValueError(
            f"{', '.join(settings)}: must change only when {type(method).__name__} computes and "
            "what stands in, not where or for how many steps; wrap anew for that"
        )
    return new


def _check_known(cls: type, settings: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__} has no setting {unknown[0]!r}; it has {', '.join(known)}")


def methods() -> dict[str, str]:
    """Return the names of all feature methods with one sentence each."""
    return _told(METHODS)


def policies() -> dict[str, str]:
    """Return the names of all policies for diffusion language models with one sentence each."""
    return _told(POLICIES)


def _told(names: Iterable[str]) -> dict[str, str]:
    return {name: (method_class(name).__doc__ or "").strip().split("\n")[0] for name in names}


def settings_of(make: Callable[..., Any]) -> str:
    """Return the settings of a method's class or a recipe's function, with their defaults."""
    own = inspect.signature(make).parameters.values()
    return ", ".join(
        each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in own
    )


def read_word(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings that one word of a command line gives.

    Args:
        text: `name` or `name:key=value,key=value`, values as Python writes them.

    Raises:
        ValueError: If the name is missing, or a setting cannot be read or is given twice.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not colon and "=" in name:
        raise ValueError(f"method {text!r}: settings follow a colon, such as taylorseer:every=4")
    if not name:
        raise ValueError(f"method {text!r}: a name is missing; `diffcache methods` lists them")
    if colon and not rest:
        raise ValueError(f"method {text!r}: settings are missing behind the colon")
    settings: dict[str, Any] = {}
    for pair in split(text, rest):
        key, value = _setting(text, pair)
        if key in settings:
            raise ValueError(f"method {text!r}: {key} is given twice")
        settings[key] = value
    return name, settings


def _setting(text: str, pair: str) -> tuple[str, Any]:
    key, sign, value = (part.strip() for part in pair.partition("="))
    if not sign or not key.isidentifier() or not value:
        raise ValueError(
            f"method {text!r}: {pair.strip()!r} must be a setting and its value, such as every=4"
        )
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, {"true": True, "false": False}.get(value, value)


def split(text: str, rest: str, at: str = ",") -> list[str]:
    """Split at the commas that stand outside of brackets and quotes.

    Args:
        text: The whole word, for the error.
        rest: Text to split.
        at: Another sign to split at.

    Raises:
        ValueError: If a bracket or quote is open.
    """
    parts, depth, quote = [""], 0, ""
    for sign in rest:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES:
            quote = sign
        else:
            depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign == at and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    if quote or depth:
        raise ValueError(f"method {text!r}: {rest!r} has an open quote or bracket")
    return [part for part in parts if part or len(parts) > 1]

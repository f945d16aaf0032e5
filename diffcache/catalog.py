"""Methods and policies by name, for command lines; code imports the classes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from diffcache.features.base import Method
from diffcache.features.combine import goes_in_place
from diffcache.features.each import Each
from diffcache.features.parts.hold import Held
from diffcache.method import Configuration
from diffcache.registry import check_settings, find, read_word, rows_of, unknown
from diffcache.settings_file import is_settings_file, read_settings


def method_class(name: str) -> type[Method]:
    """Return the class of a method, or of a policy for language models, by its name; or raise UnknownMethodError."""
    row = find(name, "method", "dllm")
    if row is None:
        raise unknown(name, "method", "dllm")
    found: type[Method] = row.load()
    return found


def make_method(
    method: str | Method | Configuration, /, facts: Callable[[], Mapping[str, Any]] | None = None, **settings: Any
) -> Method:
    """Return a method from its name and settings, or from another library's configuration.

    `hold="int8"`, `"bf16"` or `"host"` is a setting that every method has; see `Held`. With `model="flux.1-dev"` the
    settings that are not given are those published for that model.

    Args:
        method: A method; its name, after which settings may follow as on the command line, `taylorseer:every=4`; a
            file of settings, `cache.yaml`; or a configuration of diffusers or cache-dit that has an equal.
        facts: Returns facts about the model that it is for, as `Method.check_model` has them; without tables a method
            then takes the settings published for that model, if any are.
        **settings: Settings of a method given by name.

    Raises:
        AttachError: If the model may be one of several that settings were published for.
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If a setting is unknown or out of its range, or a configuration has no equal.
        TypeError: If `method` is nothing of the kind.
    """
    hold = settings.pop("hold", None)
    if hold is not None:
        return Held(make_method(method, facts, **settings), hold)
    if is_settings_file(method):
        saved = read_settings(method)
        if settings:
            raise ValueError(
                f"settings {sorted(settings)} go with a method's name, not with {str(method)!r}; change "
                "them in the file, or by diffcache.update when it is wrapped"
            )
        if saved.components is not None:
            raise ValueError(
                f"method={str(method)!r}: is for components={list(saved.components)!r} of a pipeline, "
                "which diffcache.wrap alone takes"
            )
        held = {} if saved.hold is None else {"hold": saved.hold}
        return make_method(saved.method, facts, **saved.settings, **held)
    if not isinstance(method, str):
        from diffcache.features.peer_configs import method_of_config  # `import diffcache` stays light

        made = method if isinstance(method, Method) else method_of_config(method)
        if made is None:
            raise TypeError(
                f"method={method!r}: must be a name, such as 'taylorseer', a method, such as "
                "TaylorSeer(), or a configuration of diffusers or cache-dit; recipes for key-value "
                "caches go into a language model, by diffcache.wrap or diffcache.kv.cache_for"
            )
        if settings:
            raise ValueError(f"settings {sorted(settings)} go with a method's name, not with {method!r}")
        return made
    if set(method) & set(":="):
        name, own = read_word(method)
        twice = sorted(own.keys() & settings.keys())
        if twice:
            raise ValueError(f"method {method!r}: {twice[0]} is given twice")
        return make_method(name, facts, **own, **settings)
    named: Method = _made(method_class(method), facts, settings)
    return named


def _made(cls: Any, facts: Callable[[], Mapping[str, Any]] | None, settings: dict[str, Any]) -> Any:
    """Return a method of a class, with published settings where a model's are asked for."""
    check_settings(cls, settings)
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
    if isinstance(method, Each):
        return Each(tuple((name, changed(own, settings)) for name, own in method.methods))
    check_settings(type(method), settings)
    new: Method = dataclasses.replace(method, **settings)  # type: ignore[type-var]
    if not goes_in_place(new, method):
        raise ValueError(
            f"{', '.join(settings)}: must change only when {type(method).__name__} computes and "
            "what stands in, not where or for how many steps; wrap anew for that"
        )
    return new


def has_settings(method: Method, names: Collection[str]) -> bool:
    """Return whether a method has all settings of some names."""
    inner: Any = method.method if isinstance(method, Held) else method
    if isinstance(inner, Each):
        return all(has_settings(own, names) for _, own in inner.methods)
    return set(names) <= {entry.name for entry in dataclasses.fields(inner)}


def methods() -> dict[str, str]:
    """Return the names of all feature methods with one sentence each."""
    return {name: row.sentence for name, row in rows_of("method").items()}


def settings_of(make: Callable[..., Any]) -> str:
    """Return the settings of a method's class or a recipe's function, with their defaults."""
    own = inspect.signature(make).parameters.values()
    return ", ".join(each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in own)

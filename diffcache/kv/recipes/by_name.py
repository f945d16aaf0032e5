"""Recipes by name, for command lines; code imports the functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from diffcache.kv.recipe import Recipe
from diffcache.registry import find, read_word, rows_of, split, unknown


def recipe_function(name: str) -> Callable[..., Recipe]:
    """Return what makes a recipe, "-" and "_" in its name being the same, or raise UnknownMethodError."""
    row = find(name, "recipe")
    if row is None:
        raise unknown(name, "recipe")
    function: Callable[..., Recipe] = row.load()
    return function


def recipe_names() -> list[str]:
    """Return the names of all recipes, in the order of the registry."""
    return list(rows_of("recipe"))


def make_recipe(recipe: str | Recipe, **settings: Any) -> Recipe:
    """Return a recipe from its name and settings; a recipe is returned as it is.

    Args:
        recipe: A recipe, its name, or a word as on the command line, `snapkv:budget=0.5|kivi`.
        **settings: Settings of a recipe given by name; `base` may be such a word itself.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If a setting is unknown, missing or out of its range.
        TypeError: If `recipe` is neither a name nor a recipe.
    """
    if isinstance(recipe, Recipe):
        if settings:
            raise ValueError(f"settings {sorted(settings)} go with a name, not with {recipe!r}")
        return recipe
    if callable(recipe):
        name = getattr(recipe, "__name__", repr(recipe))
        raise TypeError(f"recipe={name}: is what makes a recipe; call it, as in {name}(budget=256)")
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe={recipe!r}: must be a name, such as 'snapkv', or a recipe, such as "
            "diffcache.kv.snapkv(budget=256); feature methods go to diffcache.wrap"
        )
    if set(recipe) & set(":=|"):
        return read_recipe(recipe, **settings)
    if isinstance(settings.get("base"), str):
        settings["base"] = make_recipe(settings["base"])
    function = recipe_function(recipe)
    taken = inspect.signature(function)
    unknown_settings = sorted(set(settings) - set(taken.parameters))
    if unknown_settings:
        raise ValueError(f"{recipe} has no setting {unknown_settings[0]!r}; it has {', '.join(taken.parameters)}")
    try:
        taken.bind(**settings)
    except TypeError as error:
        raise ValueError(f"{recipe}: {error}; its settings are {taken}") from error
    return function(**settings)


def read_recipe(
    text: str, settle: Callable[[str, dict[str, Any]], Mapping[str, Any]] = lambda name, given: given, **settings: Any
) -> Recipe:
    """Return the recipe that a word describes, of one name or of several joined by `|`.

    Args:
        text: `name` or `name:key=value,...`; `none` does nothing.
        settle: Function of a name and the settings of the word; it returns the settings to take.
        **settings: Further settings, for a word of one name.

    Raises:
        UnknownMethodError: If the registry has no such name.
        ValueError: If a setting cannot be read, is unknown, given twice, or does not go with the
            others.
    """
    parts = split(text, text, "|")
    if settings and len(parts) > 1:
        raise ValueError(f"settings {sorted(settings)} go with one name, not with {text!r}")
    whole = Recipe()
    for part in parts:
        if not part.partition(":")[0].strip():
            raise ValueError(f"a name is missing between the signs | of {text!r}; `diffcache kv --list` lists them")
        name, own = read_word(part.strip())
        if name == "none" and not own:
            continue
        twice = sorted(own.keys() & settings.keys())
        if twice:
            raise ValueError(f"recipe {text!r}: {twice[0]} is given twice")
        whole = whole | make_recipe(name, **settle(name, own), **settings)
    return whole


def reference(make: Callable[..., Recipe]) -> str:
    """Return source and departures, as a recipe's docstring has them, or raise ValueError if it has none."""
    doc = inspect.getdoc(make) or ""
    match = re.search(r"^Reference: (.*?)(?=\n\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError(f"{make.__name__}: its docstring has no line 'Reference: ...'")
    return " ".join(match.group(1).split())


def recipes() -> dict[str, str]:
    """Return the names of all recipes with one sentence each."""
    return {name: row.sentence for name, row in rows_of("recipe").items()}

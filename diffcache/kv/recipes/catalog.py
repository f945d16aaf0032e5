"""Recipes by name, for command lines; code imports the functions."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from diffcache.kv.recipe import Recipe
from diffcache.names import RECIPES, recipe_key, recipe_names, unknown


def recipe_function(name: str) -> Callable[..., Recipe]:
    """Return what makes a recipe, by its name; "-" and "_" mean the same.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
    """
    key = recipe_key(name)
    for module, names in RECIPES.items():
        if key in names:
            function: Callable[..., Recipe] = getattr(
                importlib.import_module(f"diffcache.kv.recipes.{module}"), key
            )
            return function
    raise unknown(name, "recipe")


def make_recipe(recipe: str | Recipe, **settings: Any) -> Recipe:
    """Return a recipe from its name and settings; a recipe is returned as it is.

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
    function = recipe_function(recipe)
    taken = inspect.signature(function)
    unknown_settings = sorted(set(settings) - set(taken.parameters))
    if unknown_settings:
        raise ValueError(
            f"{recipe} has no setting {unknown_settings[0]!r}; it has {', '.join(taken.parameters)}"
        )
    try:
        taken.bind(**settings)
    except TypeError as error:
        raise ValueError(f"{recipe}: {error}; its settings are {taken}") from error
    return function(**settings)


def reference(make: Callable[..., Recipe]) -> str:
    """Return where a recipe comes from, and its departures, as its docstring has them.

    Raises:
        ValueError: If it names no reference.
    """
    doc = inspect.getdoc(make) or ""
    match = re.search(r"^Reference: (.*?)(?=\n\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError(f"{make.__name__}: its docstring has no line 'Reference: ...'")
    return " ".join(match.group(1).split())


def bibtex(name: str) -> str:
    """Return the BibTeX entry of a recipe's paper, under the name the method goes by.

    Raises:
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If no paper describes it.
    """
    source = reference(recipe_function(name))
    match = re.match(r"(?!none)(.*?),? arXiv ((\d\d)\d\d\.\d{5})", source)
    if match is None:
        why = source.removeprefix("none; ")
        raise ValueError(f"{recipe_key(name)!r} has no paper of its own: {why}")
    title, number, year = match.groups()
    return "\n".join([
        "% The title is the name the method goes by; its page has the full title and the authors.",
        f"@misc{{{recipe_key(name)}20{year},",
        f"  title={{{title.strip(chr(34))}}},",
        f"  eprint={{{number}}},",
        "  archivePrefix={arXiv},",
        f"  url={{https://arxiv.org/abs/{number}}},",
        f"  year={{20{year}}}",
        "}",
    ])  # fmt: skip


def recipes() -> dict[str, str]:
    """Return the names of all recipes with one sentence each."""
    functions = {name: recipe_function(name) for name in recipe_names()}
    return {name: (inspect.getdoc(make) or "").split("\n")[0] for name, make in functions.items()}

"""Recipes in one word of a command line: `snapkv:budget=0.25|kivi:bits=2`."""

from __future__ import annotations

from typing import Any

from diffcache.eval.kv.peer import PREFIX, PressPeer, peer
from diffcache.eval.kv.tables import MARK, read_table, settings_of
from diffcache.eval.methods import naming
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.catalog import read_recipe
from diffcache.registry import read_word

NONE = "none"
BASE = "base"  # a setting that is a recipe, in quotes
TABLES = "tables"  # a file that gives several settings


def parse_row(text: str, weights: str | None = None) -> Recipe | PressPeer:
    """Return what a row of a sweep stands for: a recipe, or a press of kvpress.

    A press is `kvpress/name:budget=0.25,...`; the rest is as in `parse_recipe`.

    Raises:
        UnknownMethodError: If there is no such name.
        MissingPackageError: If kvpress is asked for and is not installed.
        ValueError: If a setting is wrong, as in `parse_recipe`, or a press stands beside `|`.
    """
    if not text.strip().startswith(PREFIX):
        return parse_recipe(text, weights)
    if "|" in text:
        raise ValueError(f"recipe {text!r}: kvpress does not compose with |; ask for it alone")
    name, settings = read_word(text.strip())
    with naming(f"recipe {text!r}"):
        return peer(name, **settings)


def parse_recipe(text: str, weights: str | None = None) -> Recipe:
    """Return the recipe that a word describes.

    Args:
        text: `none`, a name, or `name:key=value,...`; several joined by `|` do all they say. A value `@file` is read
            from tables, and `tables=file` gives all that the file has, see `diffcache.eval.kv.tables`; a base is a
            word in quotes, `adakv:base='snapkv:budget=0.5,window=8'`.
        weights: Digest of the weights of the model that it is for, which its tables must be of; None checks nothing.

    Raises:
        UnknownMethodError: If there is no such name.
        TablesError: If a table is not there.
        ValueError: If a setting cannot be read, is unknown, or does not go with the others.
    """
    if not text.strip():
        raise ValueError("recipe '': a name is missing; `diffcache kv --list` lists them")

    def settled(name: str, given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if TABLES in given:
            found = settings_of(given.pop(TABLES), name.replace("-", "_"), weights)
        return found | {key: _value(key, value, weights) for key, value in given.items()}

    with naming(f"recipe {text!r}"):
        return read_recipe(text, settled)


def names_tables(text: str) -> bool:
    """Return whether a word names tables, which must be of its model."""
    return f"{TABLES}=" in text or f"={MARK}" in text


def _value(key: str, value: Any, weights: str | None) -> Any:
    if isinstance(value, str) and value.startswith(MARK):
        return read_table(value, key, weights)
    if isinstance(value, str) and key == BASE:
        return parse_recipe(value, weights)
    return value

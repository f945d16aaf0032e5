"""Citation of the paper behind a method."""

from __future__ import annotations

import re
from typing import Any

from diffcache.api import handle_of
from diffcache.catalog import method_class
from diffcache.features.base import Method
from diffcache.names import recipe_key, recipe_names


def cite(target: Any) -> str:
    """Return the BibTeX entry of the paper of a method, or of a recipe for key-value caches.

    Args:
        target: A wrapped pipeline or denoiser, a method or its class, a recipe, or the catalogue
            name of either; a recipe made of several has an entry for each.

    Raises:
        AttachError: If the target is none of these and is not wrapped.
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If the method is your own combination, or a recipe, which no paper describes.

    Example:
        >>> print(diffcache.cite("taylorseer"))  # doctest: +SKIP
    """
    from diffcache.kv.recipe import Recipe  # here, so that `import diffcache` stays light

    if isinstance(target, Recipe) or (
        isinstance(target, str) and recipe_key(target) in recipe_names()
    ):
        return _of_recipe(target)
    if isinstance(target, str):
        method: Any = method_class(target)
    elif isinstance(target, Method) or _is_method_class(target):
        method = target
    else:
        method = handle_of(target).method
    if not method.bibtex:
        raise ValueError(
            f"{method!r} has no paper of its own; cite those of the parts it is made of, such as "
            "diffcache.cite('taylorseer')"
        )
    return str(method.bibtex)


def _of_recipe(target: Any) -> str:
    """Return the entries of a recipe, or of those that it is made of: `"snapkv | kivi"`."""
    from diffcache.kv.recipes.catalog import bibtex

    if isinstance(target, str):
        return bibtex(target)
    names = [name for name in re.findall(r"\w+", target.name) if name in recipe_names()]
    if not names:
        raise ValueError(f"{target!r} has no paper of its own; cite those of its parts")
    return "\n".join(map(bibtex, names))


def _is_method_class(target: object) -> bool:
    return isinstance(target, type) and issubclass(target, Method)

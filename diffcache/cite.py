"""How to cite the paper behind a method."""

from __future__ import annotations

from typing import Any

from diffcache.api import handle_of
from diffcache.catalog import method_class
from diffcache.features.base import FeatureMethod


def cite(target: Any) -> str:
    """Return the BibTeX entry of a method's paper.

    Args:
        target: A wrapped pipeline or denoiser, a method, its class, or its catalogue name.

    Raises:
        AttachError: If the target is none of these and is not wrapped.
        UnknownMethodError: If the catalogue has no such name.
        ValueError: If the method is your own combination, which no paper describes.

    Example:
        >>> print(diffcache.cite("taylorseer"))  # doctest: +SKIP
    """
    if isinstance(target, str):
        method: Any = method_class(target)
    elif isinstance(target, FeatureMethod) or _is_method_class(target):
        method = target
    else:
        method = handle_of(target).method
    if not method.bibtex:
        raise ValueError(
            f"{method!r} has no paper of its own; cite those of the parts it is made of, such as "
            "diffcache.cite('taylorseer')"
        )
    return str(method.bibtex)


def _is_method_class(target: object) -> bool:
    return isinstance(target, type) and issubclass(target, FeatureMethod)

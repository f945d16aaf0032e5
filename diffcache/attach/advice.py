"""Say in errors which settings help, to who has them."""

from __future__ import annotations

from diffcache.features.base import Method
from diffcache.step import Site


def can_set(method: Method, name: str) -> bool:
    """Return whether a method has a setting of that name."""
    return name in getattr(type(method), "__dataclass_fields__", {})


def use_sites(method: Method, sites: list[Site]) -> str:
    """Return the advice to cache at other sites, or to take a method that lets them be set."""
    names = " or ".join(f"site={site.value!r}" for site in sites)
    return (
        f"use {names}"
        if can_set(method, "site")
        else f"use a method with {names}, such as TaylorSeer"
    )

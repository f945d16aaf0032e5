"""Recipes in models of transformers: the one part of the core that knows them."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from diffcache.errors import MissingError

if TYPE_CHECKING:
    from diffcache.kv.hf.cache import KVCache as KVCache
    from diffcache.kv.hf.cache import cache_for as cache_for
    from diffcache.kv.hf.cache import detach as detach
    from diffcache.kv.hf.implicit import caching as caching
    from diffcache.kv.hf.layer_inputs import remat_cache_for as remat_cache_for
    from diffcache.kv.hf.questions import ask as ask
    from diffcache.kv.hf.static import static_cache_for as static_cache_for

# transformers takes seconds to import, so names are looked up when they are first asked for.
_LATER = {
    "KVCache": "cache",
    "cache_for": "cache",
    "detach": "cache",
    "ask": "questions",
    "caching": "implicit",
    "remat_cache_for": "layer_inputs",
    "static_cache_for": "static",
}
_OLDEST = "5.14"  # of transformers; feature caches take earlier ones

if Version(version("transformers")) < Version(_OLDEST):
    raise MissingError(
        f"key-value caches need transformers {_OLDEST} or newer, and {version('transformers')} is "
        "installed: pip install -U transformers"
    )


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'diffcache.kv.hf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diffcache.kv.hf.{_LATER[name]}"), name)

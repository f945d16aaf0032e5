"""Key-value caches: one store for language models, diffusion language models and causal video.

>>> cache = diffcache.kv.cache_for(model, "snapkv", budget=256)  # doctest: +SKIP
>>> cache = diffcache.kv.cache_for(model, diffcache.kv.snapkv(256))  # doctest: +SKIP
>>> model.generate(**inputs, past_key_values=cache)  # doctest: +SKIP
>>> diffcache.kv.detach(model)  # doctest: +SKIP

Every recipe is here by its name: `recipe_names()` lists them.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from diffcache.names import RECIPES as _RECIPES
from diffcache.names import recipe_names as recipe_names

if TYPE_CHECKING:
    from diffcache.kv.hf import ask as ask
    from diffcache.kv.hf import cache_for as cache_for
    from diffcache.kv.hf import caching as caching
    from diffcache.kv.hf import detach as detach
    from diffcache.kv.hf import static_cache_for as static_cache_for
    from diffcache.kv.recipe import Recipe as Recipe
    from diffcache.kv.recipes.catalog import make_recipe as make_recipe
    from diffcache.kv.recipes.eviction import *  # noqa: F403
    from diffcache.kv.recipes.eviction_more import *  # noqa: F403
    from diffcache.kv.recipes.eviction_offline import *  # noqa: F403
    from diffcache.kv.recipes.low_rank import *  # noqa: F403
    from diffcache.kv.recipes.merging import *  # noqa: F403
    from diffcache.kv.recipes.quantized import *  # noqa: F403
    from diffcache.kv.recipes.retrieval import *  # noqa: F403
    from diffcache.kv.recipes.streaming import *  # noqa: F403

# Imported when they are first asked for: transformers takes seconds. Name -> module.
_LATER = {name: f"{__name__}.recipes.{module}" for module in _RECIPES for name in _RECIPES[module]}
_LATER |= dict.fromkeys(
    ("ask", "cache_for", "caching", "detach", "static_cache_for"), f"{__name__}.hf"
)
_LATER |= {"Recipe": f"{__name__}.recipe", "make_recipe": f"{__name__}.recipes.catalog"}

__all__ = ["recipe_names", *_LATER]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        close = difflib.get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

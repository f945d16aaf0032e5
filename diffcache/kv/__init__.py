"""Key-value caches: one store for language models, diffusion language models and causal video.

Examples:
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

from diffcache.registry import places

if TYPE_CHECKING:
    from diffcache.kv.hf import ask as ask
    from diffcache.kv.hf import cache_for as cache_for
    from diffcache.kv.hf import caching as caching
    from diffcache.kv.hf import detach as detach
    from diffcache.kv.hf import static_cache_for as static_cache_for
    from diffcache.kv.hf.documents import Documents as Documents
    from diffcache.kv.hf.rapid import rapid as rapid
    from diffcache.kv.hf.transmla import to_mla as to_mla
    from diffcache.kv.hf.triforce import triforce as triforce
    from diffcache.kv.life.prefix import PrefixTree as PrefixTree
    from diffcache.kv.life.prefix import time_to_live as time_to_live
    from diffcache.kv.life.prepacking import pack as pack
    from diffcache.kv.life.save import load as load
    from diffcache.kv.life.save import save as save
    from diffcache.kv.recipe import Recipe as Recipe
    from diffcache.kv.recipes.by_name import make_recipe as make_recipe
    from diffcache.kv.recipes.by_name import recipe_names as recipe_names
    from diffcache.kv.recipes.eviction import *  # noqa: F403
    from diffcache.kv.recipes.low_rank import *  # noqa: F403
    from diffcache.kv.recipes.merging import *  # noqa: F403
    from diffcache.kv.recipes.quantized import *  # noqa: F403
    from diffcache.kv.recipes.retrieval import *  # noqa: F403
    from diffcache.kv.recipes.streaming import *  # noqa: F403
    from diffcache.kv.reuse.ape import ape as ape
    from diffcache.kv.reuse.cachecraft import cachecraft as cachecraft
    from diffcache.kv.reuse.cachecraft import chunks_of as chunks_of
    from diffcache.kv.reuse.hydragen import hydragen as hydragen
    from diffcache.kv.reuse.piece import Piece as Piece
    from diffcache.kv.reuse.piece import cut as cut
    from diffcache.kv.reuse.piece import joined as joined
    from diffcache.kv.reuse.piece import lay_out as lay_out
    from diffcache.kv.reuse.recompute import cacheblend as cacheblend
    from diffcache.kv.reuse.recompute import kvshare as kvshare
    from diffcache.kv.reuse.recompute import pie as pie

# Imported when they are first asked for: transformers takes seconds. Name -> module.
_LATER = {**places("recipe"), **places("reuse"), "Recipe": f"{__name__}.recipe"}
for _module, _names in {
    "hf": ("ask", "cache_for", "caching", "detach", "static_cache_for"),
    "recipes.by_name": ("make_recipe", "recipe_names"),
    "life.save": ("load", "save"),
    "life.prefix": ("PrefixTree", "time_to_live"),
    "reuse.cachecraft": ("chunks_of",),
    "hf.documents": ("Documents",),
    "hf.rapid": ("rapid",),
    "hf.triforce": ("triforce",),
    "hf.transmla": ("to_mla",),
    "reuse.piece": ("Piece", "cut", "joined", "lay_out"),
}.items():
    _LATER |= dict.fromkeys(_names, f"{__name__}.{_module}")

# It measures, so it stands in a part above this one, which is imported only if it is called.
_LATER["choose"] = "diffcache.eval.kv.choose_recipe"

__all__ = [*_LATER]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        close = difflib.get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

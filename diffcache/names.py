"""The catalogue: the names of all feature methods and of all recipes for key-value caches.

"-" and "_" mean the same in a name, in Python and on command lines.
"""

from __future__ import annotations

import difflib
from typing import Literal

from diffcache.errors import UnknownMethodError

# Method -> where its class is.
METHODS = {
    "interval": "diffcache.features.interval:Interval",
    "first-block": "diffcache.features.first_block:FirstBlock",
    "taylorseer": "diffcache.features.taylorseer:TaylorSeer",
    "confidence-gated-taylor": "diffcache.features.confidence_gated:ConfidenceGatedTaylor",
    "teacache": "diffcache.features.teacache:TeaCache",
    "magcache": "diffcache.features.magcache:MagCache",
    "dbcache": "diffcache.features.dbcache:DBCache",
    "seacache": "diffcache.features.seacache:SeaCache",
    "ertacache": "diffcache.features.ertacache:ERTACache",
    "fitted-forecast": "diffcache.features.fitted:FittedForecast",
    "bac": "diffcache.features.bac:BAC",
    "cachequant": "diffcache.features.cachequant:CacheQuant",
    "harmonica": "diffcache.features.harmonica:HarmoniCa",
    "profilingdit": "diffcache.features.profilingdit:ProfilingDiT",
    "regione": "diffcache.features.regione:RegionE",
    "temporal-table": "diffcache.features.temporal_table:TemporalTable",
    "tuned": "diffcache.features.tuned:Tuned",
}

# Module of `diffcache.kv.recipes` -> the recipes it defines.
RECIPES: dict[str, tuple[str, ...]] = {
    "streaming": ("streaming_llm", "duo_attention", "razor_attention"),
    "eviction": (
        "random", "knorm", "value_norm", "keydiff", "lagkv", "expected_attention", "h2o", "tova",
        "snapkv", "pyramidkv", "cake", "adakv", "criticalkv",
    ),
    "eviction_more": (
        "scissorhands", "keyformer", "lazy_eviction", "windowkv", "mpcache_static", "critic",
        "epicache", "kvzip", "curdkv", "compactor",
    ),
    "eviction_offline": ("prefixkv", "compresskv", "scalekv"),
    "merging": (
        "d2o", "ems", "elastic_cache", "look_m", "kvmerger", "chelsea", "lococo", "kvcrush",
        "locret",
    ),
    "quantised": (
        "kivi", "gear", "zipcache", "mikv", "rotatekv", "vidkv", "xquant", "staircase", "mustafar",
    ),
    "low_rank": ("xkv", "minicache", "cskv", "kv_heads", "rematerialised", "xquant_latent"),
    "retrieval": (
        "quest", "mpcache_select", "double_sparsity", "tidal_decode", "sentence_kv", "rekv",
        "actqkv", "a2ats", "shadowkv",
    ),
}  # fmt: skip


def method_key(name: str) -> str:
    """Return a name as `METHODS` writes it."""
    return name.replace("_", "-")


def recipe_key(name: str) -> str:
    """Return a name as `RECIPES` and the code write it."""
    return name.replace("-", "_")


def recipe_names() -> list[str]:
    """Return the names of all recipes, in the order of the catalogue."""
    return [name for names in RECIPES.values() for name in names]


def unknown(name: str, kind: Literal["method", "recipe"]) -> UnknownMethodError:
    """Return the error for a name that is not in the catalogue, with what may have been meant.

    Args:
        name: What was asked for.
        kind: What was expected; a name of the other kind is told where it belongs.
    """
    ours, theirs = list(METHODS), recipe_names()
    ours_key, theirs_key = method_key(name), recipe_key(name)
    place = "is a recipe for key-value caches; pass it to diffcache.kv.cache_for or `diffcache kv`"
    if kind == "recipe":
        ours, theirs, ours_key, theirs_key = theirs, ours, theirs_key, ours_key
        place = "is a feature method; pass it to diffcache.wrap or `diffcache run --method`"
    if theirs_key in theirs:
        return UnknownMethodError(f"unknown {kind} {name!r}: {theirs_key!r} {place}")
    for key, names, more in ((ours_key, ours, "?"), (theirs_key, theirs, f"? It {place}")):
        close = difflib.get_close_matches(key, names, n=1)
        if close:
            return UnknownMethodError(f"unknown {kind} {name!r}; did you mean {close[0]!r}{more}")
    return UnknownMethodError(f"unknown {kind} {name!r}; known: {', '.join(ours)}")

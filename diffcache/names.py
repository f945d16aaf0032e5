"""The catalogue: names of feature methods, policies for language models, and key-value recipes.

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

# Names that others give -> the method here.
PEERS = {
    "fbcache": "first-block",
    "fb-cache": "first-block",
    "first-block-cache": "first-block",
    "cache-dit": "dbcache",
    "db-cache": "dbcache",
    "taylor-seer": "taylorseer",
    "tea-cache": "teacache",
    "mag-cache": "magcache",
    "sea-cache": "seacache",
    "fora": "interval",
}
MISSING = ("easycache", "easy-cache", "lazycache", "lazy-cache", "pab", "fastercache")

# Cache policy for diffusion language models -> where its class is.
POLICIES = {
    "d2cache": "diffcache.dllm.d2_cache:D2Cache",
    "dkv-cache": "diffcache.dllm.dkv_cache:DKVCache",
    "dllm-cache": "diffcache.dllm.dllm_cache:DLLMCache",
    "elastic": "diffcache.dllm.elastic_cache:ElasticCache",
    "fast-dllm": "diffcache.dllm.fast_dllm:FastDLLM",
    "free-cache": "diffcache.dllm.free_cache:FreeCache",
    "window-diffusion": "diffcache.dllm.window_diffusion:WindowDiffusion",
}

# Module of `diffcache.kv.recipes` -> the recipes it defines.
RECIPES: dict[str, tuple[str, ...]] = {
    "streaming": ("streaming_llm", "duo_attention", "razor_attention"),
    "eviction": (
        "random", "knorm", "value_norm", "keydiff", "lagkv", "expected_attention", "h2o", "tova",
        "snapkv", "pyramidkv", "cake", "adakv", "criticalkv",
    ),
    "eviction_more": (
        "scissorhands", "keyformer", "lazy_eviction", "windowkv", "epicache", "kvzip", "curdkv",
        "compactor",
    ),
    "eviction_offline": ("prefixkv", "compresskv", "scalekv"),
    "merging": (
        "d2o", "ems", "elastic_cache", "look_m", "kvmerger", "chelsea", "lococo", "kvcrush",
        "locret",
    ),
    "quantized": (
        "kivi", "gear", "zipcache", "mikv", "rotatekv", "vidkv", "xquant", "staircase", "mustafar",
    ),
    "low_rank": ("xkv", "minicache", "cskv", "kv_heads", "rematerialised", "xquant_latent"),
    "retrieval": (
        "quest", "mpcache_select", "double_sparsity", "tidal_decode", "sentence_kv", "rekv",
        "probe_query", "a2ats", "shadowkv",
    ),
}  # fmt: skip


def method_key(name: str) -> str:
    """Return a name as `METHODS` and `POLICIES` write it."""
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
        name: Name that was asked for.
        kind: Kind that was expected; a name of the other kind gets a hint where it belongs.
    """
    key = method_key(name).lower()
    if key in PEERS:
        return UnknownMethodError(f"unknown {kind} {name!r}; it is called {PEERS[key]!r} here")
    if key in MISSING:
        return UnknownMethodError(f"unknown {kind} {name!r}; this method is not here yet")
    methods = {recipe_key(method): method for method in METHODS | POLICIES}
    names = methods | {recipe: recipe for recipe in recipe_names()}
    close = difflib.get_close_matches(recipe_key(name), names, n=1)
    if not close:
        known = methods.values() if kind == "method" else recipe_names()
        return UnknownMethodError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    place = ""
    if close[0] in methods and kind == "recipe":
        place = " It is a method: pass it to diffcache.wrap or `diffcache run --method`"
    if close[0] not in methods and kind == "method":
        place = (
            " It is a recipe for key-value caches: pass it to diffcache.kv.cache_for or "
            "`diffcache kv --recipe`"
        )
    is_meant = close[0] == recipe_key(name)
    hint = f"{'this is' if is_meant else 'did you mean'} {names[close[0]]!r}"
    return UnknownMethodError(f"unknown {kind} {name!r}; {hint}{'.' if is_meant else '?'}{place}")

"""Settings for every recipe of the catalogue that do something in prompts of 48 tokens."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from diffcache.kv import Recipe, make_recipe
from diffcache.kv.learn import lococo as mixing
from diffcache.kv.learn import locret as retaining
from diffcache.kv.learn.cskv import Bases
from diffcache.registry import rows_of

Make = Callable[[], Recipe]
# Of the four layers of two heads that `tiny.llama` has.
HEADS = ((True, False), (False, True), (False, False), (True, True))
VOTERS = ((0,), (1, 2), (3,), (0, 1, 2, 3))
SHARES = (0.5, 0.1, 0.3, 0.1)
CHANNELS = (((0, 2, 8, 13), (1, 5, 7, 9)),) * 4
WHOLE = torch.eye(32)
BASES = (Bases(WHOLE, WHOLE, WHOLE, WHOLE),) * 4
RETAINING = retaining.fresh(4, 128, 2, width=16)
MIXING = mixing.fresh(4, 8, 32, taps=5, gate=1.0)
# With doors and tests of their own: patches of images, inputs of layers, probes.
APART = ("scalekv", "rematerialised", "xquant_latent", "epicache", "kvzip")


# Settings without a default.
TABLES: dict[str, dict[str, Any]] = {
    "duo_attention": {"heads": HEADS},
    "razor_attention": {"heads": HEADS},
    "compresskv": {"heads": VOTERS, "weights": SHARES},
    "locret": {"heads": RETAINING},
    "lococo": {"weights": MIXING},
    "double_sparsity": {"channels": CHANNELS},
    "cskv": {"bases": BASES},
    "kv_heads": {"bases": BASES},
}
# How far the logits of what loses nothing may be from stock: keys that are turned, other sums.
TURNED = 1e-5
ROUNDING = {"compactor": TURNED, "shadowkv": 1e-6}
ROUNDING |= dict.fromkeys(("expected_attention", "streaming_llm", "razor_attention"), 1e-4)
ROUNDING |= dict.fromkeys(("rekv", "probe_query", "a2ats"), 1e-9)
# Other ways through the code of recipes: name in tests -> word of a command line.
VARIANTS = {
    "h2o, mean": "h2o:budget=0.3,mean=True,every=3",
    "snapkv, max": "snapkv:budget=12,window=4,kernel=3,pooling=max,groups=max",
    "adakv of h2o": "adakv:base='h2o:budget=0.4'",
    "criticalkv of adakv": """criticalkv:base="adakv:base='snapkv:budget=12,window=4'\"""",
    "streaming_llm, unturned": "streaming_llm:budget=12,rotate=False",
    "scissorhands of a share": "scissorhands:budget=0.3,history=16,recent=4",
    "scissorhands, one row full": "scissorhands:budget=47,history=16,recent=4",
    "keyformer of a share": "keyformer:budget=0.3",
    "windowkv, aggregation": "windowkv:budget=16,window=4,size=4,task=aggregation,best=2,group=3,beta=1.5",
    "prefixkv, table": f"prefixkv:budget=14,sinks=2,shares={SHARES}",
    "prefixkv, official": "prefixkv:budget=14,sinks=2,distance=5,mode=official",
    "d2o, official": "d2o:budget=12,mode=official",
    "d2o, pre": "d2o:budget=12,space=pre",
    "ems, pre": "ems:budget=16,window=4,threshold=0.0,space=pre",
    "elastic_cache, official": "elastic_cache:budget=12,distance=5,mode=official",
    "look_m, weighted": "look_m:budget=12,merge=weighted,space=pre",
    "kvmerger, pre": "kvmerger:budget=12,threshold=0.0,recent=4,space=pre",
    "chelsea, pre": "chelsea:budget=12,chunk=8,recent=4,every=4,space=pre",
    "kvcrush, official": "kvcrush:budget=24,recent=4,mode=official",
    "snapkv | kivi": "snapkv:budget=20,window=4|kivi:bits=4,group=4,residual=8",
    "snapkv | minicache": "snapkv:budget=20,window=4|minicache:block=8",
    "snapkv | rotatekv": "snapkv:budget=20,window=4|rotatekv:group=8,recent=8",
}
MERGING = ("d2o", "ems", "elastic_cache", "look_m", "kvmerger", "chelsea")
LOSSLESS_VARIANTS = {
    "h2o, mean": "h2o:budget=1.0,mean=True,every=3",
    "streaming_llm, unturned": "streaming_llm:budget=1.0,rotate=False",
    "prefixkv, official": "prefixkv:budget=1.0,sinks=2,mode=official",
    "d2o, official": "d2o:budget=64,mode=official",
    "elastic_cache, official": "elastic_cache:budget=1.0,mode=official",
    "kvcrush, official": "kvcrush:budget=1.0,mode=official",
    **{f"{name}, pre": f"{name}:budget=1.0,space=pre" for name in MERGING},
}


@cache
def examples() -> dict[str, Make]:
    """Return one recipe for each name, with `skips` of its row."""
    known = {name: row for name, row in rows_of("recipe").items() if row.skips is not None}
    return {name: partial(make_recipe, name, **TABLES.get(name, {}) | row.skips) for name, row in known.items()}


@cache
def variants() -> dict[str, Make]:
    """Return the same recipes under settings that take another way through the code."""
    return {name: partial(make_recipe, word) for name, word in VARIANTS.items()}


@cache
def lossless() -> dict[str, tuple[Make, float]]:
    """Return recipes that lose nothing, with how far from stock their logits may be."""
    found: dict[str, tuple[Make, float]] = {
        name: (partial(make_recipe, name, **TABLES.get(name, {}) | row.off), ROUNDING.get(name, 0))
        for name, row in rows_of("recipe").items()
        if row.off is not None
    }
    for name, word in LOSSLESS_VARIANTS.items():
        found[name] = partial(make_recipe, word), TURNED if name.endswith("pre") else 0
    return found

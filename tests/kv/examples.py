"""Settings for every recipe of the catalogue that do something in prompts of 48 tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from diffcache.kv.learn import lococo as mixing
from diffcache.kv.learn import locret as retaining
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.catalog import make_recipe
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
# How far the logits of what loses nothing may be from stock.
ROUNDING = {
    "streaming_llm": 1e-6, "rekv": 1e-9, "probe_query": 1e-9, "a2ats": 1e-9, "shadowkv": 1e-6,
}  # fmt: skip


def examples() -> dict[str, Make]:
    """Return one recipe for each name, with `skips` of its row."""
    return {
        name: partial(make_recipe, name, **row.skips, **TABLES.get(name, {}))
        for name, row in rows_of("recipe").items()
        if row.skips is not None
    }


def lossless() -> dict[str, tuple[Make, float]]:
    """Return recipes that lose nothing, with how far from stock their logits may be."""
    return {
        name: (
            partial(make_recipe, name, **row.off, **TABLES.get(name, {})),
            ROUNDING.get(name, 0.0),
        )
        for name, row in rows_of("recipe").items()
        if row.off is not None
    }

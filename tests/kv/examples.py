"""Settings for every recipe of the catalogue that do something in prompts of 48 tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diffcache.kv.budget import Size
from diffcache.kv.learn import lococo as mixing
from diffcache.kv.learn import locret as retaining
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes import (
    eviction,
    eviction_more,
    eviction_offline,
    low_rank,
    merging,
    quantized,
    retrieval,
    streaming,
)

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


def examples() -> dict[str, Make]:
    """Return one recipe for each name."""
    return {
        "streaming_llm": lambda: streaming.streaming_llm(12),
        "duo_attention": lambda: streaming.duo_attention(HEADS, 12),
        "razor_attention": lambda: streaming.razor_attention(HEADS, 0.3, least=8),
        "random": lambda: eviction.random(12),
        "knorm": lambda: eviction.knorm(12),
        "value_norm": lambda: eviction.value_norm(12),
        "keydiff": lambda: eviction.keydiff(0.4),
        "lagkv": lambda: eviction.lagkv(16, lag=8),
        "expected_attention": lambda: eviction.expected_attention(14, future=32),
        "h2o": lambda: eviction.h2o(0.3),
        "tova": lambda: eviction.tova(12),
        "snapkv": lambda: eviction.snapkv(12, window=4),
        "pyramidkv": lambda: eviction.pyramidkv(14, window=4),
        "cake": lambda: eviction.cake(14, window=4),
        "adakv": lambda: eviction.adakv(base=eviction.snapkv(12, window=4)),
        "criticalkv": lambda: eviction.criticalkv(base=eviction.snapkv(12, window=4)),
        "scissorhands": lambda: eviction_more.scissorhands(12, history=16, recent=4),
        "keyformer": lambda: eviction_more.keyformer(12),
        "lazy_eviction": lambda: eviction_more.lazy_eviction(12, lag=3, threshold=0.02),
        "windowkv": lambda: eviction_more.windowkv(16, window=4, size=4, group=2),
        "curdkv": lambda: eviction_more.curdkv(12, window=5, sinks=2),
        "compactor": lambda: eviction_more.compactor(20, chunk=8),
        "prefixkv": lambda: eviction_offline.prefixkv(14, sinks=2),
        "compresskv": lambda: eviction_offline.compresskv(
            16, heads=VOTERS, weights=SHARES, window=4, kernel=3, least=6
        ),
        "d2o": lambda: merging.d2o(12),
        "ems": lambda: merging.ems(16, window=4, threshold=0.0),
        "elastic_cache": lambda: merging.elastic_cache(12, distance=5),
        "look_m": lambda: merging.look_m(12),
        "kvmerger": lambda: merging.kvmerger(12, threshold=0.0, recent=4),
        "chelsea": lambda: merging.chelsea(12, chunk=8, recent=4, every=4),
        "lococo": lambda: merging.lococo(MIXING, 12, recent=4, chunk=4),
        "kvcrush": lambda: merging.kvcrush(12, recent=4),
        "locret": lambda: merging.locret(RETAINING, 12, stabilizers=4, chunk=4),
        "kivi": lambda: quantized.kivi(4, group=8, residual=16),
        "gear": lambda: quantized.gear(4, group=8, buffer=16),
        "zipcache": lambda: quantized.zipcache(every=16),
        "mikv": lambda: quantized.mikv(16, every=4, queries=8, group=8, bits=4),
        "rotatekv": lambda: quantized.rotatekv(4, group=8, heads=2, recent=8),
        "vidkv": lambda: quantized.vidkv(group=8, residual=16),
        "xquant": lambda: quantized.xquant(group=8, residual=16),
        "staircase": lambda: quantized.staircase((8, 16, 32), group=8),
        "mustafar": lambda: quantized.mustafar(recent=8),
        "xkv": lambda: low_rank.xkv(block=16),
        "minicache": lambda: low_rank.minicache(block=16, bits=4, skip=2),
        "cskv": lambda: low_rank.cskv(BASES, recent=8, bits=8),
        "kv_heads": lambda: low_rank.kv_heads(BASES, bits=8),
        **{name: lambda make=make: make(24) for name, make in _reading().items()},  # type: ignore[misc]
    }


def lossless() -> dict[str, tuple[Make, float]]:
    """Return recipes that lose nothing, with how far from stock their logits may be."""
    rounding = {"rekv": 1e-9, "probe_query": 1e-9, "a2ats": 1e-9, "shadowkv": 1e-6}
    return {
        "h2o": (lambda: eviction.h2o(1.0), 0.0),
        "snapkv": (lambda: eviction.snapkv(1.0, window=4), 0.0),
        "adakv": (lambda: eviction.adakv(base=eviction.snapkv(1.0, window=4)), 0.0),
        "streaming_llm": (lambda: streaming.streaming_llm(4096), 1e-6),
        **{
            name: (lambda make=make: make(1.0), rounding.get(name, 0.0))  # type: ignore[misc]
            for name, make in _reading().items()
        },
    }


def _reading() -> dict[str, Callable[[Size], Recipe]]:
    return {
        "quest": lambda n: retrieval.quest(n, page=4, skip=1),
        "mpcache_select": lambda n: retrieval.mpcache_select(n, large=8, small=4),
        "double_sparsity": lambda n: retrieval.double_sparsity(
            CHANNELS, n, recent=4, bits=4, skip=0
        ),
        "tidal_decode": lambda n: retrieval.tidal_decode(n, select=(1, 3), recent=4),
        "sentence_kv": lambda n: retrieval.sentence_kv(n, sinks=2, recent=4, block=4),
        "rekv": lambda n: retrieval.rekv(n, recent=4, sinks=2, block=4),
        "probe_query": lambda n: retrieval.probe_query(n, density=1.0, block=4, recent=4),
        "a2ats": lambda n: retrieval.a2ats(n, codes=16, far=4, recent=4),
        "shadowkv": lambda n: retrieval.shadowkv(
            44 if n == 24 else n, rank=32, outliers=1, block=8
        ),
    }

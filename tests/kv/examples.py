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
MERGING = {
    name: getattr(merging, name)
    for name in ("d2o", "ems", "elastic_cache", "look_m", "kvmerger", "chelsea")
}
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


def variants() -> dict[str, Make]:
    """Return the same recipes under settings that take another way through the code."""
    snap = lambda n: eviction.snapkv(n, window=4)  # noqa: E731
    return {
        "h2o, mean": lambda: eviction.h2o(0.3, mean=True, every=3),
        "snapkv, max": lambda: eviction.snapkv(12, window=4, kernel=3, pooling="max", groups="max"),
        "adakv of h2o": lambda: eviction.adakv(base=eviction.h2o(0.4)),
        "criticalkv of adakv": lambda: eviction.criticalkv(base=eviction.adakv(base=snap(12))),
        "streaming_llm, unturned": lambda: streaming.streaming_llm(12, rotate=False),
        "scissorhands of a share": lambda: eviction_more.scissorhands(0.3, history=16, recent=4),
        "keyformer of a share": lambda: eviction_more.keyformer(0.3),
        "windowkv, aggregation": lambda: eviction_more.windowkv(
            16, window=4, size=4, task="aggregation", best=2, group=3, beta=1.5
        ),
        "prefixkv, table": lambda: eviction_offline.prefixkv(14, sinks=2, shares=SHARES),
        "prefixkv, official": lambda: eviction_offline.prefixkv(
            14, sinks=2, distance=5, mode="official"
        ),
        "d2o, official": lambda: merging.d2o(12, mode="official"),
        "d2o, pre": lambda: merging.d2o(12, space="pre"),
        "ems, pre": lambda: merging.ems(16, window=4, threshold=0.0, space="pre"),
        "elastic_cache, official": lambda: merging.elastic_cache(12, distance=5, mode="official"),
        "look_m, weighted": lambda: merging.look_m(12, merge="weighted", space="pre"),
        "kvmerger, pre": lambda: merging.kvmerger(12, threshold=0.0, recent=4, space="pre"),
        "chelsea, pre": lambda: merging.chelsea(12, chunk=8, recent=4, every=4, space="pre"),
        "kvcrush, official": lambda: merging.kvcrush(24, recent=4, mode="official"),
        "snapkv | kivi": lambda: snap(20) | quantized.kivi(4, group=4, residual=8),
        "snapkv | minicache": lambda: snap(20) | low_rank.minicache(block=8),
        "snapkv | rotatekv": lambda: snap(20) | quantized.rotatekv(group=8, recent=8),
    }


def lossless() -> dict[str, tuple[Make, float]]:
    """Return recipes that lose nothing, with how far from stock their logits may be."""
    turned = 1e-5  # keys that are turned back and forth
    rounding = {"rekv": 1e-9, "probe_query": 1e-9, "a2ats": 1e-9, "shadowkv": 1e-6}
    rows: dict[str, tuple[Callable[[Size], Recipe], float]] = {
        "random": (eviction.random, 0.0),
        "knorm": (eviction.knorm, 0.0),
        "keydiff": (eviction.keydiff, 0.0),
        "value_norm": (lambda n: eviction.value_norm(n, recent=2), 0.0),
        "lagkv": (lambda n: eviction.lagkv(n, lag=6), 0.0),
        "expected_attention": (lambda n: eviction.expected_attention(n, future=64), 1e-4),
        "h2o": (eviction.h2o, 0.0),
        "h2o, mean": (lambda n: eviction.h2o(n, mean=True, every=3), 0.0),
        "tova": (eviction.tova, 0.0),
        "snapkv": (lambda n: eviction.snapkv(n, window=4), 0.0),
        "pyramidkv": (lambda n: eviction.pyramidkv(n, window=4, beta=4), 0.0),
        "cake": (lambda n: eviction.cake(n, window=4), 0.0),
        "adakv": (lambda n: eviction.adakv(base=eviction.snapkv(n, window=4)), 0.0),
        "criticalkv": (
            lambda n: eviction.criticalkv(base=eviction.adakv(base=eviction.snapkv(n))),
            0.0,
        ),
        "streaming_llm, unturned": (lambda n: streaming.streaming_llm(n, rotate=False), 0.0),
        "streaming_llm": (lambda n: streaming.streaming_llm(n, sinks=2), 1e-4),
        "duo_attention": (lambda n: streaming.duo_attention(((True, True),) * 4, n), 0.0),
        "razor_attention": (lambda n: streaming.razor_attention(HEADS, n, least=6), 1e-4),
        "scissorhands": (lambda n: eviction_more.scissorhands(n, history=16, recent=4), 0.0),
        "keyformer": (eviction_more.keyformer, 0.0),
        "lazy_eviction": (lambda n: eviction_more.lazy_eviction(n, lag=3), 0.0),
        "windowkv": (lambda n: eviction_more.windowkv(n, window=4, size=4, group=2), 0.0),
        "curdkv": (lambda n: eviction_more.curdkv(n, window=5, sinks=2), 0.0),
        "compactor": (lambda n: eviction_more.compactor(n, chunk=8), turned),
        "prefixkv": (lambda n: eviction_offline.prefixkv(n, sinks=2, shares=SHARES), 0.0),
        "prefixkv, official": (
            lambda n: eviction_offline.prefixkv(n, sinks=2, mode="official"),
            0.0,
        ),
        "compresskv": (lambda n: eviction_offline.compresskv(n, heads=VOTERS, window=4), 0.0),
        **{
            f"{name}{', pre' if space == 'pre' else ''}": (
                lambda n, make=make, space=space: make(n, space=space),  # type: ignore[misc]
                turned if space == "pre" else 0.0,
            )
            for name, make in MERGING.items()
            for space in ("post", "pre")
        },
        "d2o, official": (lambda _: merging.d2o(64, mode="official"), 0.0),
        "elastic_cache, official": (lambda n: merging.elastic_cache(n, mode="official"), 0.0),
        "lococo": (lambda _: merging.lococo(MIXING, 64), 0.0),
        "kvcrush": (merging.kvcrush, 0.0),
        "kvcrush, official": (lambda n: merging.kvcrush(n, mode="official"), 0.0),
        "locret": (lambda _: merging.locret(RETAINING, 64), 0.0),
        **{name: (make, rounding.get(name, 0.0)) for name, make in _reading().items()},
    }
    return {
        name: (lambda make=make: make(1.0), tolerance)  # type: ignore[misc]
        for name, (make, tolerance) in rows.items()
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

"""Bytes that a store really holds, everything included, and what it costs attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffcache.eval.kv.offline import seen_by
from diffcache.eval.kv.recall import exact_bytes
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import adakv
from diffcache.kv.recipes.quantized import kivi
from diffcache.kv.store import KVStore
from diffcache.pipelines.small.recall import RecallBatch, Task, draw
from diffcache.pipelines.small.recall_llama import DIRECTORY, load

TOKENS = 4096
HEADS, GROUPS, SIZE, ASKED = 8, 4, 128, 32
SEED = 1 << 42  # of a context that nothing else is measured on


def cases() -> dict[str, tuple[Recipe, float | None]]:
    """Return the recipes that are weighed, and the share of exact bytes they may take."""
    return {
        "kivi 2 bit, group 32, residual 128": (kivi(bits=2, group=32, residual=128), 0.22),
        "kivi 4 bit, group 32, residual 128": (kivi(bits=4, group=32, residual=128), None),
        "adakv, a tenth": (adakv(0.1), 0.13),
        "adakv, a tenth, kivi 2 bit": (adakv(0.1) | kivi(bits=2, group=32, residual=128), None),
    }


@torch.no_grad()
def held_rows(tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Return the bytes of each case for random keys, heads of 128; nothing is said of errors.

    Args:
        tokens: Number of tokens of the prompt.
    """
    drawn = torch.Generator().manual_seed(0)
    k, v, q = (
        torch.randn(1, heads, count, SIZE, generator=drawn).half()
        for heads, count in ((HEADS, tokens), (HEADS, tokens), (HEADS * GROUPS, ASKED))
    )
    exact = 2 * k.numel() * k.element_size()
    rows = []
    for name, (recipe, most) in cases().items():
        store = KVStore(1, recipe)
        store.begin(tokens)
        store.layers[0].write(k, v)
        # The last queries are all that the recipes here look at.
        store.attend(0, Query(q, tokens - ASKED, SIZE**-0.5))
        store.settle()
        rows.append(_row(f"random, {name}", store, exact, most, None))
    return rows


@torch.no_grad()
def trained_rows(tokens: int = TOKENS + 1) -> list[dict[str, Any]]:
    """Return bytes and the error of attention on recall-llama; nothing where it is not trained.

    The error is that of the outputs of all layers, for the queries of a question after a context,
    over the compressed and over the exact context: the norm of the difference by the norm.

    Args:
        tokens: Number of tokens of the context, 1 + 4 n.
    """
    if not (DIRECTORY / "config.json").is_file():
        return []
    model = load(torch.bfloat16, DIRECTORY)
    blocks = (tokens - 1) // 4
    task = Task(1 + 4 * blocks, min(blocks // 2, 128), 1)
    batch = draw(1, task, torch.Generator().manual_seed(SEED))
    try:
        whole = _read(model, Recipe(), batch)
        asked = torch.cat([batch.context, batch.questions[:, 0]], 1)
        later = [seen.query.narrow(task.context, seen.query.count) for seen in seen_by(model, asked)]
        wanted = _outputs(whole, later)
        exact = exact_bytes(whole, task.context)
        rows = []
        for name, (recipe, most) in cases().items():
            cache = _read(model, recipe, batch)
            error = float((_outputs(cache, later) - wanted).norm() / wanted.norm())
            rows.append(_row(f"recall-llama, {name}", cache.store, exact, most, error))
        return rows
    finally:
        detach(model)


def _row(name: str, store: KVStore, exact: int, most: float | None, error: float | None) -> dict[str, Any]:
    held = store.nbytes
    return {
        "name": name,
        "bytes": held,
        "exact_bytes": exact,
        "share": held / exact,
        "target_share": most,
        "error": error,
    }


def _read(model: nn.Module, recipe: Recipe, batch: RecallBatch) -> KVCache:
    cache = cache_for(model, recipe, mode="native")
    model(input_ids=batch.context, **with_cache(model, cache))
    cache.settle()
    return cache


def _outputs(cache: KVCache, later: list[Query]) -> Tensor:
    """Return the attention of later queries over what a cache holds, [L, B, Hq, n, Dv]."""
    layers = zip(cache.store.layers, later, strict=True)
    return torch.stack([attend(asked, layer.views()).float() for layer, asked in layers])

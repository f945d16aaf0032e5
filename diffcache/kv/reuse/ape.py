"""APE: contexts encoded side by side, and attended to as one with sharper attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.foreign import with_cache
from diffcache.kv.hf.refresh import check_whole
from diffcache.kv.segment import Dense, Traits
from diffcache.kv.slots import Slots, join
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail


def ape(
    model: Any,
    cache: Any,
    prefix: Tensor,
    contexts: Sequence[Tensor],
    *,
    temperature: float = 0.9,
    scale: float = 0.9,
) -> int:
    """Fill a cache with contexts that are encoded in parallel after a shared prefix.

    Each context is encoded after the prefix as if there were no other, at the same positions.
    Queries attend to all contexts together, their logits divided by the temperature, and the
    log-sum-exp of that is multiplied by `scale * temperature` before it is merged with the prefix
    and what follows. One context with both at 1 is plain attention.

    Reference: APE, arXiv 2502.05431.

    Args:
        model: A model of transformers.
        cache: An empty cache of `cache_for(model, ..., mode="native")`.
        prefix: int64 [n], what all contexts follow, at least one token.
        contexts: int64 [m], each.
        temperature: Above 0, dimensionless; below 1 sharpens.
        scale: Above 0, dimensionless.

    Returns:
        The position of the first token of what follows: the length of the prefix and the longest
        context. Models of transformers are to be given as many tokens before it.

    Raises:
        ValueError: If a number is out of range, there is no prefix or context, or the cache is
            not as said.
    """
    if not temperature > 0 or not scale > 0:
        raise ValueError(f"temperature={temperature}, scale={scale}: must be above 0")
    if not len(prefix) or not contexts or not all(len(each) for each in contexts):
        raise ValueError(
            f"prefix={list(prefix.shape)}, contexts={[len(each) for each in contexts]}: give a "
            "prefix, such as the first token of every prompt, and contexts that are not empty"
        )
    _check(cache)
    store: KVStore = cache.store
    traits = Traits(temperature, scale * temperature, apart=True)
    found: list[list[Slots]] = [[] for _ in store.layers]
    with torch.no_grad():
        model(input_ids=prefix[None], **with_cache(model, cache))
        for context in contexts:
            model(input_ids=context[None], **with_cache(model, cache))
            for layer, parts in zip(store.layers, found, strict=True):
                parts.append(layer.read().narrow(len(prefix), layer.held).clone())
                layer.summary = None
            cache.crop(-len(context))
    longest = max(len(context) for context in contexts)
    for layer, parts in zip(store.layers, found, strict=True):
        layer.settle_tail()
        layer.segments.append(Dense(join(parts), traits))
        layer.seen += longest
        layer.tail = Tail(layer.seen)
    return len(prefix) + longest


def _check(cache: Any) -> None:
    recipe, store = cache.store.recipe, cache.store
    check_whole(cache)
    if cache.mode != "native" or store.seen or recipe.evicts or recipe.codec is not None:
        raise ValueError(
            f"cache: mode {cache.mode!r}, {store.seen} tokens seen, recipe {recipe.name!r}; use an "
            "empty cache in native mode, with a recipe that drops and codes nothing"
        )

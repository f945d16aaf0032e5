"""APE: contexts encoded side by side, and attended to as one with sharper attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diffcache.kv.hf.refresh import check_whole
from diffcache.kv.reuse.piece import Piece, lay_out, placed, turns_of
from diffcache.kv.rotary import Rotation
from diffcache.kv.segment import Dense, Traits
from diffcache.kv.settings import Positive, check_setting
from diffcache.kv.slots import Slots, join
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail


def ape(
    cache: Any,
    prefix: Piece,
    contexts: Sequence[Piece],
    *,
    temperature: float = 0.9,
    scale: float = 0.9,
    rotary: Sequence[Rotation] | None = None,
) -> int:
    """Fill a cache with contexts that were encoded in parallel after a shared prefix.

    Queries attend to all contexts together, their logits divided by the temperature, and the
    log-sum-exp of that is multiplied by `scale * temperature` before it is merged with the prefix
    and what follows. One context with both at 1 is plain attention.

    Reference: APE, arXiv 2502.05431.

    Args:
        cache: An empty cache of `cache_for(model, ..., mode="native")`.
        prefix: Text that each context was read after, at least one token; see
            `diffcache.kv.reuse.piece.cut`.
        contexts: Contexts, each cut from a cache in which it followed the prefix.
        temperature: Above 0, dimensionless; below 1 sharpens.
        scale: Above 0, dimensionless.
        rotary: Rotation of each layer, where the cache holds rotated keys and the pieces do not.

    Returns:
        The position of the first token of what follows: the length of the prefix and the longest
        context. Models of transformers are to be given as many tokens before it.

    Raises:
        ValueError: If a number is out of range, there is no prefix or context, a context was read
            elsewhere, or the cache is not as said.
    """
    check_setting("temperature", temperature, Positive)
    check_setting("scale", scale, Positive)
    start = len(prefix.ids)
    if not start or not contexts or not all(len(each.ids) for each in contexts):
        raise ValueError(
            f"prefix={start} tokens, contexts={[len(each.ids) for each in contexts]}: give a "
            "prefix, such as the first token of every prompt, and contexts that are not empty"
        )
    if len({each.rotated for each in (prefix, *contexts)}) > 1:
        raise ValueError("contexts: give all pieces rotated, as the prefix is, or none")
    for number, each in enumerate(contexts):
        if int(each.layers[0].rpos[0, 0, 0]) != start:
            raise ValueError(
                f"contexts[{number}] begins at position {int(each.layers[0].rpos[0, 0, 0])}: read "
                f"it right after the {start} tokens of the prefix"
            )
    _check(cache)
    store: KVStore = cache.store
    turns = turns_of(store, prefix, torch.arange(start), rotary)
    lay_out(store, prefix, torch.arange(start), rotary)
    longest = max(len(each.ids) for each in contexts)
    traits = Traits(temperature, scale * temperature, apart=True)
    for number, (layer, turn) in enumerate(zip(store.layers, turns, strict=True)):
        parts = []
        for each in contexts:
            slots = each.layers[number]
            k = placed(layer, slots, slots.rpos, each.rotated, turn)
            parts.append(Slots(k, slots.v, {"pos": slots.rpos.to(torch.int32)}))
        layer.settle_tail()
        layer.segments.append(Dense(join(parts), traits))
        layer.seen += longest
        layer.tail = Tail(layer.seen)
    return start + longest


def _check(cache: Any) -> None:
    recipe, store = cache.store.recipe, cache.store
    check_whole(cache)
    if cache.mode != "native" or store.seen or recipe.evicts or recipe.codec is not None:
        raise ValueError(
            f"cache: mode {cache.mode!r}, {store.seen} tokens seen, recipe {recipe.name!r}; use an "
            "empty cache in native mode, with a recipe that drops and codes nothing"
        )

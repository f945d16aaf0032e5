"""Take over what a cache of transformers holds, and hand out what one of ours holds."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from diffcache.errors import AttachError
from diffcache.kv.hf.layer import FusedLayer, copy_states
from diffcache.kv.hf.writer import Host
from diffcache.kv.layer import KVLayer
from diffcache.kv.segment import PLAIN
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail

_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)


def check_past(past: Any, stock: Sequence[Any], owned: Sequence[int]) -> int:
    """Return the tokens that a cache of transformers has seen.

    Args:
        past: Cache that is to be taken over.
        stock: Layers of a new cache of transformers for the model.
        owned: Numbers of the layers that follow a recipe.

    Raises:
        AttachError: If it is no `DynamicCache`, or not one of this model.
    """
    name = type(past).__name__
    if isinstance(getattr(past, "store", None), KVStore):
        raise AttachError(f"past={name}: is a cache of cache_for already; go on from past.fork()")
    if not isinstance(past, DynamicCache):
        raise AttachError(
            f"past={name}: must be a DynamicCache, whose keys and values are plain tensors; read "
            "the prompt again with DynamicCache(config=model.config), or with this cache"
        )
    if past.offloading:
        raise AttachError(f"past={name}(offloading=True): must be on the device of the model")
    kinds = [type(layer) for layer in past.layers]
    wanted = [type(layer) for layer in stock]
    fits = len(kinds) == len(wanted) and all(
        one in _PLAIN if index in owned and other in _PLAIN else one is other
        for index, (one, other) in enumerate(zip(kinds, wanted, strict=True))
    )
    lengths = {past.layers[index].get_seq_length() for index in owned} if fits else set()
    if len(lengths) != 1:
        said = ", ".join(sorted({kind.__name__ for kind in kinds})) or "none"
        raise AttachError(
            f"past={name} of {len(kinds)} layers ({said}): the layers of this model are "
            f"{len(wanted)} ({', '.join(sorted({kind.__name__ for kind in wanted}))}), all of one "
            "length; make it with DynamicCache(config=model.config)"
        )
    return int(lengths.pop())


def check_unobserved(store: KVStore) -> None:
    """Refuse recipes that cannot do without the queries of tokens that are taken over.

    Raises:
        AttachError: If each of them has to be seen.
        ValueError: If frequencies of rotation change with the length.
    """
    recipe = store.recipe
    if recipe.score is not None and recipe.score.statistics:
        raise AttachError(
            f"past: {recipe.name} notes how every query of the prompt attended, and those of `past`"
            " are gone; read the prompt with this cache, or use a recipe that looks at keys alone "
            "or at the last queries, such as keydiff or snapkv"
        )
    if any(layer.rotary is not None and layer.rotary.varies for layer in store.layers):
        raise ValueError(
            f"past: {recipe.name} holds keys before rotation, and this model's frequencies change "
            "with the length, so that those of `past` are not known; read the prompt with this "
            "cache"
        )


def take_over(cache: Host, past: DynamicCache, mask: Tensor | None, seen: int) -> None:
    """Write copies of what a cache of transformers holds, as if the prompt had been read.

    Args:
        cache: A new cache.
        past: Cache that is taken over; it stays as it is.
        mask: bool or int [B, seen], 0 for padding; None where there is none.
        seen: Tokens that `past` has seen.

    Raises:
        ValueError: If the mask is of another shape.
    """
    store, setup = cache.store, cache.setup
    check_unobserved(store)
    if cache.writer.noted is not None:
        raise AttachError(
            f"past: {store.recipe.name} holds keys before rotation, and positions on several axes "
            "are not known of `past`; read the prompt with this cache, or use a recipe that holds "
            "keys as they are (space='post')"
        )
    first = past.layers[setup.owned[0]].keys
    if mask is not None and mask.shape != (len(first), seen):
        raise ValueError(
            f"past_mask={list(mask.shape)}: must be {[len(first), seen]}, 0 for padding"
        )
    valid = pos = None
    if mask is not None and setup.mode == "native" and not bool(mask.all()):
        valid = mask.to(first.device).bool()
        pos = (valid.long().cumsum(-1) - 1).clamp_min(0)  # as `generate` has them
    store.begin(seen)
    for number, index in enumerate(setup.owned):
        k, v = past.layers[index].keys.detach(), past.layers[index].values.detach()
        gone = seen - k.shape[2]  # those that a window has left behind
        store.layers[number].tail = Tail(gone)
        store.layers[number].seen = gone
        own = None if valid is None else valid[:, gone:]
        at = pos if pos is None else pos[:, gone:]
        cache.writer.write(number, k, v, valid=own, position_ids=at)
        cache.layers[index].is_initialized = True
        if isinstance(cache.layers[index], FusedLayer):
            copy_states(past.layers[index], cache.layers[index])
    for index, layer in enumerate(past.layers):
        if index not in setup.owned:
            cache.layers[index] = deepcopy(layer)
    store.taken_over = True
    if setup.mode == "native":
        cache.writer.past = valid if valid is not None else first.new_ones(1, seen).bool()


def dynamic_of(cache: Host) -> DynamicCache:
    """Return a cache of transformers with the same content, keys and values decoded.

    Raises:
        ValueError: If slots were dropped, merged or moved: a `DynamicCache` knows no positions.
    """
    made = DynamicCache(config=cache.setup.config)
    for number, index in enumerate(cache.setup.owned):
        core = cache.store.layers[number]
        if not core.seen:
            continue
        slots = _all_of(core, cache.setup.windows[number])
        if slots is None:
            raise ValueError(
                f"layer {index} holds {core.held} slots of {core.seen} tokens, not each of the "
                "last ones as it came: a DynamicCache takes each slot for the next token; go on "
                "with this cache, or use a recipe that drops and merges nothing"
            )
        made.layers[index].update(slots.k, slots.v)
        if isinstance(cache.layers[index], FusedLayer):
            copy_states(cache.layers[index], made.layers[index])
        if core.held < core.seen:
            made.layers[index].cumulative_length += core.seen - core.held
    for index, layer in enumerate(cache.layers):
        if index not in cache.setup.owned:
            made.layers[index] = deepcopy(layer)
    return made


def _all_of(core: KVLayer, window: int | None) -> Slots | None:
    """Return the slots of a layer if they are its tokens in order, or the last of a window."""
    gone = core.seen - core.held
    if gone and (window is None or core.held < window - 1):
        return None
    slots = core.read() if core.latent else core.rotated(core.read())
    if "logn" in slots.meta or any(segment.traits != PLAIN for segment in core.segments):
        return None
    held = torch.full((len(slots.k), 1), core.held, device=slots.k.device)
    if core.padding is not None:
        held = held - (core.padding[:, None] - gone).clamp_min(0)
    place = torch.arange(gone, core.seen, device=slots.k.device)
    whole = ((slots.pos == place) | ~slots.valid).all() & (slots.valid.sum(-1) == held).all()
    return slots if bool(whole) else None

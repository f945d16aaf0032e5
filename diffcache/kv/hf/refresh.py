"""Compute chosen tokens anew in a model, and write their keys and values over those held."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.model import NAME, decoder_config, last_logits
from diffcache.kv.slots import SlotIndex, Slots, checked
from diffcache.kv.store import KVStore

if TYPE_CHECKING:
    from diffcache.kv.hf.writer import Host

Watch: TypeAlias = "Callable[[int, Query, Slots], None]"


class _Enough(Exception):  # noqa: N818 - nothing is wrong
    """The layers after this one need not run."""


class Refreshing:
    """One forward of chosen tokens, which takes nothing off the end and adds nothing to it.

    Attributes:
        index: int64 [B, n], slots that are written.
        old: Values that were held in layer `last`, [B, H, n, Dv].
        new: Values that were computed there.
    """

    def __init__(self, store: KVStore, index: Tensor, *, last: int | None = None, watch: Watch | None = None) -> None:
        self.index = index
        self._slots: SlotIndex | range | None = None  # checked at the first layer, for all of them
        self.old: Tensor | None = None
        self.new: Tensor | None = None
        self._store = store
        self._last = last
        self._watch = watch

    def attend(self, number: int, k: Tensor, v: Tensor, asked: Query) -> Tensor:
        """Write keys and values into their slots and return the attention, [B, Hq, n, Dv].

        Args:
            number: Number of the layer in the store, from 0.
            k: [B, H, n, D], rotated as the model gives them.
            v: [B, H, n, Dv].
            asked: The queries; positions and mask are replaced by those of the slots.
        """
        layer = self._store.layers[number]
        slots = layer.read()
        place = self.index[:, None]
        if layer.rotary is not None:
            k = layer.rotary.unrotate(k, slots.rpos.gather(2, place))
        if number == self._last:
            wide = place[..., None].expand(-1, v.shape[1], -1, v.shape[3])
            self.old, self.new = slots.v.gather(2, wide), v
        self._slots = checked(self.index, layer.held, self._slots)
        self._store.torn = True
        layer.overwrite(self._slots, k, v)
        if number == self._last:
            raise _Enough
        query = replace(asked, pos=slots.pos.gather(2, place)[:, 0], mask=None)
        if self._watch is not None:
            self._watch(number, query, layer.rotated(layer.read()))
        return attend(query, layer.views())  # everything, as a prompt does, whatever a retriever chooses


def recompute(
    model: Any, cache: Host, ids: Tensor, index: Tensor, *, watch: Watch | None = None, logits: bool = True
) -> Any:
    """Compute chosen tokens anew, layer by layer, each seeing all tokens up to its own position.

    Chosen tokens see one another as they are now, and the others as they are held. Choosing all of
    them is a prefill.

    Args:
        model: A model of transformers that `cache` was made for.
        cache: A cache of `cache_for` in native mode, nothing of which is dropped or coded.
        ids: int64 [B, T], all tokens that are held.
        index: int64 [n] or [B, n], the chosen ones.
        watch: Is told each layer's number, queries and slots.
        logits: Make the logits of all chosen tokens; False makes those of the last one alone, which
            is much less work in a small model of many words.

    Returns:
        The output of the model for the chosen tokens, in the order of `index`.

    Raises:
        ValueError: If the cache cannot be written to, or does not hold these tokens.
        AttachError: If the model does not attend through this cache.
    """
    return _forward(model, cache, ids, index, watch=watch, logits=logits)[0]


def probe(model: Any, cache: Host, ids: Tensor, check: int) -> tuple[Tensor, Tensor]:
    """Compute all tokens up to layer `check` and return its values, as held and as they would be.

    Keys and values of the layers up to and including `check` are then those of a prefill.

    Args:
        model: The model, as `recompute` takes it, raising what this raises, and the two that follow.
        cache: Cache that holds `ids`.
        ids: int64 [B, T].
        check: Number of the layer, from 1 (ValueError): in the first one a token's values are its own.
    """
    count = len(cache.store.layers)
    if check not in range(1, count):
        raise ValueError(f"check={check}: must be at least 1 and below the {count} layers")
    index = torch.arange(ids.shape[1], device=ids.device)
    found = _forward(model, cache, ids, index, last=check)[1]
    assert found.old is not None
    assert found.new is not None
    return found.old, found.new


def _forward(
    model: Any, cache: Host, ids: Tensor, index: Tensor, *, logits: bool = True, **how: Any
) -> tuple[Any, Refreshing]:
    """Return the output and what was refreshed, which takes what is left of the arguments."""
    pos = _positions(cache, ids)
    used = decoder_config(model)._attn_implementation
    if used != NAME:
        raise AttachError(
            f"{type(model).__name__} uses the attention function {used!r}, not this cache: it was "
            "released, or the cache is another model's; make a new one with cache_for"
        )
    batch = len(ids)
    index = index.view(-1, index.shape[-1]).expand(batch, -1).to(ids.device)
    found = Refreshing(cache.store, index, **how)
    cache.writer.refreshing = found
    out = None
    try:
        with torch.no_grad(), suppress(_Enough):
            out = model(
                input_ids=ids.gather(1, index),
                position_ids=pos.expand(batch, -1).gather(1, index),
                **({} if logits else last_logits(model)),
                **with_cache(model, cache),
            )
    finally:
        cache.writer.refreshing = None
    cache.store.torn = False
    return out, found


def check_whole(cache: Host) -> None:
    """Raise ValueError unless all layers of the model are in the store."""
    others = len(cache.beside)
    if others:
        raise ValueError(
            f"{others} of {len(cache.layers)} layers attend to a sliding window or otherwise, and "
            "cannot be filled or written anew; use a model of full attention"
        )


def _positions(cache: Host, ids: Tensor) -> Tensor:
    """Return the rotary positions of all tokens, int64 [B, T]."""
    if cache.mode != "native":
        raise ValueError(
            f"cache.mode={cache.mode!r}: tokens are computed anew in place only in native mode; "
            "use cache_for(..., mode='native')"
        )
    if cache.writer.exchange is not None:
        raise ValueError("this cache holds inputs of layers in place of keys; use a plain recipe")
    check_whole(cache)
    if cache.writer.noted is not None:
        raise ValueError(
            "keys are held before rotation, and positions on several axes are not known of tokens computed anew; use "
            "a recipe that holds keys as they are (space='post')"
        )
    for layer in cache.store.layers:
        if layer.segments or layer.tail.length != layer.seen or layer.seen != ids.shape[1]:
            raise ValueError(
                f"layer {layer.index} holds {layer.tail.length} exact tokens in its tail and saw "
                f"{layer.seen}, ids={list(ids.shape)}: give all its tokens, before any is settled"
            )
    slots = cache.store.layers[0].read()
    if slots.pos.shape[1] > 1:
        raise ValueError("heads hold different tokens: nothing may be dropped")
    return slots.rpos[:, 0].long()

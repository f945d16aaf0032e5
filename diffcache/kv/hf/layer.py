"""A layer of a store, as transformers sees the layers of its caches."""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from diffcache.errors import AttachError
from diffcache.kv.hf.attention import announce, check_mask_sizes, handed_out
from diffcache.kv.hf.versions import FUSED
from diffcache.kv.hf.writer import Host
from diffcache.kv.layer import KVLayer


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of the store, as transformers sees it."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Host, number: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.number = number
        self._masked = 0  # keys that the mask of this forward is for, where that is known

    @property
    def cache(self) -> Host:
        """The cache it belongs to."""
        cache = self._cache()
        if cache is None:
            raise AttachError("this layer outlived its cache; keep the object of cache_for")
        return cache

    @property
    def core(self) -> KVLayer:
        """Its keys and values."""
        return self.cache.store.layers[self.number]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the store needs no shapes."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H, n, D] and return what the attention function gets.

        In native mode that is what came; the attention function writes and reads the store.
        """
        cache = self.cache
        self.is_initialized = True
        if self.number == 0 and cache.writer.refreshing is None:
            cache.begin(key_states.shape[2])
        if cache.setup.mode == "native":
            announce(cache.writer, self.number, key_states, value_states)
            return key_states, value_states
        count, kept = key_states.shape[2], self._reached()
        check_mask_sizes(count, self._masked, kept + count)
        self._masked = 0
        slots = handed_out(cache.writer.write(self.number, key_states, value_states))
        slots = slots.narrow(slots.width - kept - count, slots.width)
        return slots.k, slots.v

    def get_seq_length(self) -> int:
        """Return the tokens seen, whether or not they are still held."""
        return self.core.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys the mask is for, and the position of the first.

        In native mode the mask is by position: all that were ever seen.
        """
        cache = self.cache
        cache.check()  # transformers asks before the first layer
        if cache.setup.mode == "native":
            return cache.store.layers[self.number].seen + query_count(query_length), 0
        kept = self._reached()
        self._masked = kept + query_count(query_length)
        return self._masked, self.core.seen - kept

    def _reached(self) -> int:
        """Return how many of the slots held the next token sees."""
        window = self.cache.setup.windows[self.number]
        return self.core.held if window is None else min(self.core.held, window - 1)

    def get_max_length(self) -> int:
        """Return -1: there is no bound."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions


def query_count(queries: int | Tensor) -> int:
    """Return how many queries a mask is for; in 5.0 their positions are given, int64 [n]."""
    return queries.shape[0] if isinstance(queries, Tensor) else queries


class FusedLayer(SlotLayer, FUSED):  # type: ignore[misc]
    """A layer of full attention, by slots, and of linear attention, whose states are as they were.

    Its verbs are of the states; those of the slots are of the whole store.

    Args:
        cache: The cache it belongs to.
        number: Number of the layer in the store, from 0.
        states: A layer of transformers, or one of these, whose states it begins with.
    """

    def __init__(self, cache: Host, number: int, states: Any) -> None:
        SlotLayer.__init__(self, cache, number)
        LinearAttentionLayer.__init__(self, number_of_states=states.number_of_states)
        copy_states(states, self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for a state; the store needs no shapes."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget the states."""
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the states."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the states back, where they can be."""
        LinearAttentionLayer.crop(self, tokens_to_remove)


def copy_states(source: Any, target: Any) -> None:
    """Give a layer of linear attention copies of the states of another."""
    for name in vars(LinearAttentionLayer()):
        setattr(target, name, deepcopy(getattr(source, name)))

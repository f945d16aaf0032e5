"""Caches of transformers of fixed memory, for compiled decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache, StaticLayer

from diffcache.errors import AttachError
from diffcache.kv.hf.model import decoder_config
from diffcache.kv.hf.versions import query_count
from diffcache.kv.static import StaticWindow


def static_cache_for(model: nn.Module, capacity: int, *, sinks: int = 4) -> Cache:
    """Return a cache of fixed memory for compiled decoding: first tokens and the latest.

    Args:
        model: Model of transformers; its attention stays as it is. Prompts must not be padded.
        capacity: Slots of each layer of full attention.
        sinks: First tokens that always stay.

    Raises:
        AttachError: If it is no model of transformers, has an encoder as well, or has layers of
            states and full attention in one.
        ValueError: If `capacity` does not hold the `sinks` and one more.
    """
    config = decoder_config(model)
    layers = StaticCache(config=config, max_cache_len=2**30).layers  # nothing is allocated yet
    own = [x for x in layers if isinstance(x, StaticLayer) and not x.is_sliding]
    if any(type(x) is not StaticLayer for x in own):
        raise AttachError(
            f"{type(model).__name__} has layers of states and full attention in one, whose memory "
            "is that of the whole text; use cache_for(model, ...)"
        )
    return Cache([_Static(capacity, sinks) if type(x) is StaticLayer else x for x in layers])


class _Static(CacheLayerMixin):  # type: ignore[misc]
    """First and latest tokens in memory of a fixed size, as transformers sees them."""

    is_compileable = True
    is_sliding = False

    def __init__(self, capacity: int, sinks: int) -> None:
        super().__init__()
        self.core = StaticWindow(capacity, sinks)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, and mark them as never moving."""
        self.core.allocate(key_states, value_states)
        self.keys, self.values = self.core.k, self.core.v
        for tensor in (self.core.k, self.core.v, self.core.seen):
            torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H, n, D] and return what their queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.core.write(key_states, value_states)

    def get_seq_length(self) -> Tensor | int:
        """Return the tokens seen, as a tensor that compiled code reads."""
        return self.core.seen if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys the mask is for, and the position of the first."""
        return self.core.sizes(query_count(query_length))

    def get_max_length(self) -> int:
        """Return -1: any number of tokens can be written."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions

    def reset(self) -> None:
        """Forget everything, in place."""
        self.core.reset()

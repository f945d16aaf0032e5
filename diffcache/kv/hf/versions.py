"""Bridge the differences between versions of transformers, 5.0 and later."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from diffcache.errors import AttachError
from diffcache.kv.store import KVStore

_CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
# Layers of full attention with states beside; earlier versions have none, and no such models.
FUSED = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", DynamicLayer)


def tokens_to_crop(given: int | Tensor, store: KVStore) -> int:
    """Return how many of the last tokens `Cache.crop(given)` is to forget.

    A negative number is that many. A positive one is refused, or, in earlier versions, is the
    number of tokens that are left; most of those do not announce that tokens may be taken back.

    Args:
        given: Number of tokens that `crop` was called with; `generate` of 5.14 has a tensor.
        store: The cache's store.

    Raises:
        ValueError: If it is positive, and this version takes no length.
        AttachError: If slots are dropped, and nobody said that tokens may be taken back.
    """
    given = int(given)
    if given <= 0:
        return -given
    if not _CROPS_TO_LENGTH:
        raise ValueError(f"tokens_to_remove={given}: must be negative")
    if store.recipe.evicts and not store.speculative:
        raise AttachError(
            "this version of transformers does not tell caches that guesses may be taken back; "
            "call cache.activate_past_recording() before generate, or update transformers"
        )
    return max(store.seen - given, 0)


def has_shared_layers(config: Any, layers: Sequence[Any]) -> bool:
    """Return whether layers, those of a cache for a decoder of a configuration, read the keys of others.

    Later versions say so in the configuration, or have a dummy in the place of each; earlier ones
    leave the last layers out.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return any(str(mode).startswith("reuse") for mode in modes)
    if len(layers) < config.num_hidden_layers:
        return True
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    dummies = [index for index, layer in enumerate(layers) if type(layer).__name__ == "DummyLayer"]
    return any(types[index] not in ("moe", "mlp") for index in dummies)  # these have no attention

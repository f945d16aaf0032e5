"""What differs between the versions of transformers, 5.0 and later."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

_CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def tokens_to_crop(given: int, seen: int) -> int:
    """Return how many of the last tokens `Cache.crop(given)` is to forget.

    A negative number is that many. Others are refused, or, in earlier versions, are the tokens
    that are left.

    Args:
        given: What `crop` was called with.
        seen: Tokens before that.

    Raises:
        ValueError: If it is positive, and this version takes no length.
    """
    if given >= 0 and _CROPS_TO_LENGTH:
        return max(seen - given, 0)
    if given > 0:
        raise ValueError(f"tokens_to_remove={given}: must be negative")
    return -given


def query_count(queries: int | Tensor) -> int:
    """Return how many queries a mask is for; in 5.0 their positions are given, int64 [n]."""
    return queries.shape[0] if isinstance(queries, Tensor) else queries


def has_shared_layers(config: Any, layers: Sequence[Any]) -> bool:
    """Return whether layers of a model read the keys of others.

    Later versions have a dummy in the place of each; earlier ones leave the last layers out.

    Args:
        config: Of the decoder.
        layers: Of a cache of transformers for it.
    """
    is_short = len(layers) < config.num_hidden_layers
    return is_short or any(type(layer).__name__ == "DummyLayer" for layer in layers)

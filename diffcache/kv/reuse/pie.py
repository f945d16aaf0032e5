"""PIE: after an edit, keep what is known of the rest of the text and encode what was put in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.kv.hf.refresh import check_whole, recompute
from diffcache.kv.hf.writer import Host
from diffcache.kv.refresh import align
from diffcache.kv.reuse.piece import cut, lay_out, turns_of
from diffcache.kv.rotary import Rotation


def pie(
    model: Any,
    cache: Host,
    before: Tensor,
    after: Tensor,
    *,
    rotary: Sequence[Rotation] | None = None,
) -> Tensor:
    """Edit the text a cache holds: move keys to their new positions, encode what was put in.

    Reference: Let the Code LLM Edit Itself When You Edit the Code, arXiv 2407.03157.

    Args:
        model: A model of transformers.
        cache: A cache of `cache_for(model, ..., mode="native")` that holds `before`, in one row.
        before: int64 [T'], the text it holds.
        after: int64 [T], the text it is to hold; without its last token if `generate` is to go on
            from it.
        rotary: Rotation of each layer, where keys are held rotated (space="post").

    Returns:
        int64 [n], the tokens that were encoded.

    Raises:
        ValueError: If the cache does not hold `before`.
    """
    if len(before) != cache.store.seen:
        raise ValueError(
            f"before={list(before.shape)}: the cache has seen {cache.store.seen} tokens; give them "
            "all"
        )
    source = align(before, after)
    new = (source < 0).nonzero()[:, 0]
    if len(after) == len(before) and torch.equal(source, torch.arange(len(before))):
        return new
    check_whole(cache)
    piece = cut(cache.store, before)
    turns_of(cache.store, piece, source, rotary)  # or raise while nothing is lost
    cache.store.reset()
    lay_out(cache.store, piece, source, rotary)
    if len(new):
        recompute(model, cache, after[None], new)
    return new

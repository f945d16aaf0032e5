"""CacheBlend: chunks computed apart, put together, and the tokens that differ most repaired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.kv.hf.refresh import probe, recompute
from diffcache.kv.hf.writer import Host
from diffcache.kv.refresh import TopDeviation, slots_of
from diffcache.kv.reuse.piece import Piece, joined, lay_out
from diffcache.kv.rotary import Rotation


def cacheblend(
    model: Any,
    cache: Host,
    pieces: Sequence[Piece],
    *,
    share: float = 0.15,
    check: int = 1,
    rotary: Sequence[Rotation] | None = None,
) -> Tensor:
    """Fill a cache with chunks that were computed apart, and compute `share` of their tokens anew.

    Reference: CacheBlend, arXiv 2405.16444, section 4. Departures: tokens are chosen once, at
    layer `check`, not fewer from layer to layer; the layers up to it are run a second time for
    the chosen tokens.

    Args:
        model: A model of transformers.
        cache: An empty cache of `cache_for(model, ..., mode="native")`, of one row.
        pieces: The chunks, in order; see `diffcache.kv.reuse.piece.cut`.
        share: Share of the tokens to compute anew, those whose values differ most, 0 to 1;
            1 is a prefill.
        check: Layer whose values are compared, from 1.
        rotary: Rotation of each layer, where keys are held rotated (space="post").

    Returns:
        int64 [n], the tokens that were computed anew.

    Raises:
        ValueError: If a number is out of range, or the cache is not as said.
    """
    choice = TopDeviation(share)
    whole = joined(pieces)
    ids = whole.ids[None]
    lay_out(cache.store, whole, torch.arange(len(whole.ids)), rotary)
    index = slots_of(choice.select(probe(model, cache, ids, check)))
    if index.shape[1]:
        recompute(model, cache, ids, index)
    return index[0]

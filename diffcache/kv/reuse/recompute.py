"""Read a stored prefix in another text and compute anew the tokens that it cannot stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffcache.kv.hf.refresh import check_whole, probe, recompute
from diffcache.kv.refresh import align, most_changed, slots_of
from diffcache.kv.reuse.piece import Piece, cut, joined, lay_out, turns_of
from diffcache.kv.rotary import Rotation
from diffcache.kv.settings import Share, check_setting

if TYPE_CHECKING:
    from diffcache.kv.hf.writer import Host


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
    check_setting("share", share, Share)
    whole = joined(pieces)
    ids = whole.ids[None]
    lay_out(cache.store, whole, torch.arange(len(whole.ids)), rotary)
    old, new = probe(model, cache, ids, check)
    index = slots_of(most_changed(old, new, torch.ones_like(ids, dtype=torch.bool), share))
    if index.shape[1]:
        recompute(model, cache, ids, index, logits=False)
    return index[0]


def kvshare(
    model: Any,
    cache: Host,
    piece: Piece,
    ids: Tensor,
    *,
    share: float = 0.15,
    check: int = 1,
    rotary: Sequence[Rotation] | None = None,
) -> Tensor:
    """Fill a cache with a prompt from the cache of a similar one, and compute where they differ.

    Tokens that the other prompt lacks are computed, and of the others those whose values differ
    most at layer `check`.

    Reference: KVShare, arXiv 2503.16525. Departures: texts are aligned by difflib;
    nothing more is repaired while tokens are generated.

    Args:
        model: A model of transformers.
        cache: An empty cache of `cache_for(model, ..., mode="native")`, of one row.
        piece: The other prompt; see `diffcache.kv.reuse.piece.cut`.
        ids: int64 [T], this prompt; without its last token if `generate` is to go on from it.
        share: Share of the tokens in both prompts to compute anew, 0 to 1.
        check: Layer whose values are compared, from 1.
        rotary: Rotation of each layer, where keys are held rotated (space="post").

    Returns:
        int64 [n], the tokens that were computed.

    Raises:
        ValueError: If a number is out of range, or the cache is not as said.
    """
    check_setting("share", share, Share)
    source = align(piece.ids, ids)
    lay_out(cache.store, piece, source, rotary)
    old, new = probe(model, cache, ids[None], check)
    put_in = (source < 0).to(ids.device)[None]
    index = slots_of(put_in | most_changed(old, new, ~put_in, share))
    if index.shape[1]:
        recompute(model, cache, ids[None], index, logits=False)
    return index[0]


def pie(model: Any, cache: Host, before: Tensor, after: Tensor, *, rotary: Sequence[Rotation] | None = None) -> Tensor:
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
        raise ValueError(f"before={list(before.shape)}: the cache has seen {cache.store.seen} tokens; give them all")
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
        recompute(model, cache, after[None], new, logits=False)
    return new

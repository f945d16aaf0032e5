"""KVShare: the cache of a similar prompt, edited into that of this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from diffcache.kv.hf.refresh import probe, recompute
from diffcache.kv.hf.writer import Host
from diffcache.kv.refresh import EditScript, TopDeviation, align, slots_of
from diffcache.kv.reuse.piece import Piece, lay_out
from diffcache.kv.rotary import Rotation


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
    deviation = TopDeviation(share)
    source = align(piece.ids, ids)
    lay_out(cache.store, piece, source, rotary)
    seen = probe(model, cache, ids[None], check)
    put_in = EditScript().select(replace(seen, before=piece.ids[None]))
    kept = replace(seen, pos=seen.pos.where(~put_in, -1))
    index = slots_of(put_in | deviation.select(kept))
    if index.shape[1]:
        recompute(model, cache, ids[None], index)
    return index[0]

"""Refresh: which of the tokens that are held are computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from math import ceil

import torch
from torch import Tensor

from diffcache.kv.settings import Share, check_setting


def most_changed(old: Tensor, new: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return the tokens whose values differ most from what they would be now, bool [B, T].

    Args:
        old: Values that are held of one layer, [B, H, T, D].
        new: The same, computed now.
        valid: bool [B, T]; the others are never chosen.
        share: Share of the valid tokens of each row, 0 to 1, rounded up to whole tokens. Of tokens
            that differ as much, the first are chosen.

    Raises:
        ValueError: If `share` is out of its range.

    Reference: CacheBlend, arXiv 2405.16444, section 4.3.
    """
    check_setting("share", share, Share)
    work = torch.promote_types(old.dtype, torch.float32)
    worth = (new.to(work) - old.to(work)).square().sum((1, 3))
    order = worth.masked_fill(~valid, float("-inf")).argsort(dim=1, descending=True, stable=True)
    place = torch.arange(order.shape[1], device=order.device)
    rank = torch.empty_like(order).scatter_(1, order, place.expand_as(order))
    counts = [ceil(round(share * count, 6)) for count in valid.sum(1).tolist()]  # one wait
    return (rank < torch.tensor(counts, device=rank.device)[:, None]) & valid


def slots_of(chosen: Tensor) -> Tensor:
    """Return chosen tokens as numbers, rows filled up with their last one, int64 [B, n].

    To compute a token twice is to compute it once; a row without any computes its last token.

    Args:
        chosen: bool [B, T].
    """
    width = chosen.shape[1]
    longest = int(chosen.sum(1).max()) if chosen.numel() else 0
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, :longest]
    there = chosen.gather(1, order)
    numbers = torch.arange(width, device=chosen.device)
    last = numbers.where(chosen, -1).amax(1, keepdim=True) if longest else order
    return order.where(there, last.where(last >= 0, width - 1))


def align(before: Tensor | Sequence[int], after: Tensor | Sequence[int]) -> Tensor:
    """Return where each token, int64 [T], was in a text before, int64 [T'], -1 where it was put in; int64 [T]."""
    old, new = (x.tolist() if isinstance(x, Tensor) else list(x) for x in (before, after))
    source = torch.full((len(new),), -1)
    for match in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        source[match.b : match.b + match.size] = torch.arange(match.a, match.a + match.size)
    return source

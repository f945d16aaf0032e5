"""Attention of one query over coded segments as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kernels.coded import attn_decode_kivi, can_attend
from diffcache.kv.codec.quant import Quantized
from diffcache.kv.segment import Coded, Unread
from diffcache.kv.slots import Slots, join


def attend_coded(
    q: Tensor, scale: float, held: Unread
) -> tuple[list[Tensor], list[Tensor], Slots | None] | None:
    """Return attention over the coded slots, of which no one is empty, and what is left.

    Args:
        q: [B, Hq, D]; sees all slots.
        scale: Factor of the logits.
        held: Segments and exact slots, keys as queries meet them.

    Returns:
        The attention over each coded segment, float32 [B, Hq, Dv], its log-sum-exp [B, Hq], and
        the slots that are not coded, or whose values are not. None where no kernel runs, or the
        slots of a segment are coded otherwise.
    """
    coded = [each for each in held.segments if isinstance(each, Coded)]
    if not coded or not all(_fits(q, each) for each in coded):
        return None
    found = [_attended(q, scale, each) for each in coded]
    rest = [_uncoded(s) if isinstance(s, Coded) else s.read() for s in held.segments]
    parts = [part for part in [*rest, held.tail] if part is not None]
    outs, lses = zip(*found, strict=True)
    return list(outs), list(lses), join(parts) if parts else None


def _fits(q: Tensor, segment: Coded) -> bool:
    """Return whether a kernel attends to a segment: coded as in KIVI, and a slot is one token."""
    k, v = segment.k, segment.v
    if not isinstance(k, Quantized) or not isinstance(v, Quantized) or "logn" in segment.meta:
        return False
    kept = k.grid.of is None and v.grid.of is None and v.grid.each == 1
    if not kept or k.codec.along != "tokens" or v.codec.along != "channels":
        return False
    same = q.dtype == k.dtype == v.dtype and q.shape[2] == k.size
    return same and can_attend(
        q, k.codes, v.codes, k.codec.bits, v.codec.bits, k.grid.each, v.codec.width(v.size),
        (k.size, v.size),
    )  # fmt: skip


def _attended(q: Tensor, scale: float, segment: Coded) -> tuple[Tensor, Tensor]:
    """Return attention over the slots of a segment whose values are coded, and its log-sum-exp."""
    k, v = segment.k, segment.v
    assert isinstance(k, Quantized)
    assert isinstance(v, Quantized)
    return attn_decode_kivi(
        q, k.codes, k.grid.values, v.codes, v.grid.values, scale, int(k.codec.bits),
        int(v.codec.bits), k.grid.each, v.codec.width(v.size), -k.codec.intervals / 2,
        -v.codec.intervals / 2,
    )  # fmt: skip


def _uncoded(segment: Coded) -> Slots | None:
    """Return the slots of a segment whose values are not coded; None if all are."""
    if segment.exact is None or not segment.exact.shape[2]:
        return None
    first = segment.size - segment.exact.shape[2]
    late = torch.arange(first, segment.size, device=segment.exact.device)
    return segment.read_at(late.expand(*segment.exact.shape[:2], -1))

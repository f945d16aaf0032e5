"""Attention of queries over slots whose metadata say who sees what; parts merge by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kernels import decode
from diffcache.kernels.coded import attn_decode_kivi, can_attend
from diffcache.kernels.dense import scaled_dot_product_attention
from diffcache.kernels.merge import lse_merge
from diffcache.kv.codec.quant import Quantized
from diffcache.kv.segment import PLAIN, Coded, Traits
from diffcache.kv.slots import Slots, join
from diffcache.kv.view import Listed, Unread, View

_CAUSAL = "causal"


@dataclass(frozen=True)
class Query:
    """Queries and whom they may see.

    Attributes:
        q: [B, Hq, n, D], rotated. Query heads h * G to h * G + G - 1 read key-value head h.
        start: Position of the first query; the others follow it.
        scale: Factor of the logits.
        pos: Positions int [n] or [B, n], instead of `start`.
        mask: bool [B or 1, 1, n, T], True at the positions 0 to T - 1 that each query may see;
            positions beyond are not seen. None: those up to its own.
        causal: False lets every query see every slot, whatever its position.
        window: Number of last positions that are seen, the query's own among them; None for all.
        softcap: Bound of the logits: x becomes `softcap * tanh(x / softcap)`; None for no bound.
        sinks: [Hq], one more logit for each head, whose value is zero.
        together: True makes these queries one chunk: a retriever chooses slots for it once, by the
            mean query, instead of for each query, or reading everything as for a prompt.
    """

    q: Tensor
    start: int
    scale: float
    pos: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    together: bool = False

    @property
    def count(self) -> int:
        """Queries a row."""
        return self.q.shape[2]

    def positions(self) -> Tensor:
        """Return the positions of the queries, int64 [B or 1, n]."""
        if self.pos is not None:
            return (self.pos if self.pos.dim() == 2 else self.pos[None]).long()
        return torch.arange(self.start, self.start + self.count, device=self.q.device)[None]

    def narrow(self, start: int, stop: int) -> Query:
        """Return queries `start` to `stop`."""
        pos = None if self.pos is None else self.pos[..., start:stop]
        mask = None if self.mask is None else self.mask[:, :, start:stop]
        return replace(
            self, q=self.q[:, :, start:stop], start=self.start + start, pos=pos, mask=mask
        )

    def grouped(self, heads: int) -> Tensor:
        """Return the queries by key-value head, [B, H, G, n, D]."""
        batch, _, count, size = self.q.shape
        return self.q.reshape(batch, heads, -1, count, size)


def attend(query: Query, views: Sequence[View]) -> Tensor:
    """Return softmax attention over all views together, [B, Hq, n, Dv].

    A query that sees nothing gets the mean of what there is, or zeros where views are apart.

    Args:
        query: The queries.
        views: Slots that the queries attend to; plain views are read as one.

    Raises:
        ValueError: If there are no views.
    """
    if not views:
        raise ValueError("views=[]: there is nothing to attend to; write keys and values first")
    plain = query.softcap is None and query.sinks is None
    for view in views:
        plain = plain and view.traits == PLAIN
    if plain:
        view, found = views[0] if len(views) == 1 else _joined(views), None
        if isinstance(view.source, Unread):
            found = _over_codes(query, view)
        elif isinstance(view.source, Listed):
            found = _over_list(query, view)
        if found is None:
            found = _by_kernel(query, view)
        return _fused(query, view) if found is None else found
    out, lse = attend_parts(query, views)
    if query.sinks is not None:
        sinks = query.sinks.to(lse.dtype).view(1, -1, 1)
        out = out * (lse - torch.logaddexp(lse, sinks)).exp()[..., None]
    return out.to(query.q.dtype)


def attend_parts(query: Query, views: Sequence[View]) -> tuple[Tensor, Tensor]:
    """Return attention over the views and its log-sum-exp, without sinks.

    Returns:
        [B, Hq, n, Dv] and [B, Hq, n], in float32, or float64 for float64 queries.
    """
    plain = [view for view in views if not view.traits.apart]
    parts = ([_joined(plain)] if plain else []) + [view for view in views if view.traits.apart]
    outs, lses = zip(*(_part(query, view) for view in parts), strict=True)
    return lse_merge(outs, lses)


def visible(query: Query, slots: Slots) -> Tensor:
    """Return which slots each query sees, bool [B, 1 or H, n or 1, S], 1 for all of them alike."""
    pos = slots.pos.long()
    here = pos[:, :, None]
    seen = here >= 0
    if not query.causal and query.mask is None and query.window is None:
        return seen
    at = query.positions()[:, None, :, None]
    if query.mask is None:
        if query.causal:
            seen = seen & (here <= at)
    else:
        known = query.mask.expand(max(len(pos), len(query.mask)), pos.shape[1], -1, -1)
        width = known.shape[-1]
        place = here.clamp(0, width - 1).expand(len(known), -1, query.count, -1)
        seen = seen & known.gather(3, place) & (here < width)
    if query.window is not None:
        seen = seen & (here > at - query.window)
    return seen


def logits(query: Query, slots: Slots, traits: Traits = PLAIN) -> Tensor:
    """Return the logits of queries over slots, -inf where unseen.

    Returns:
        [B, H, G, n, S] in float32, or float64 for float64 queries.
    """
    dtype = torch.promote_types(query.q.dtype, torch.float32)
    q = query.grouped(slots.k.shape[1]).to(dtype)
    k = slots.k.to(dtype)
    if len(k) == 1 < len(q):  # shared by all rows: one product with the queries of all of them
        found = torch.einsum("bhgnd,hsd->bhgns", q, k[0])
    else:
        found = torch.einsum("bhgnd,bhsd->bhgns", q, k)
    found = found * query.scale
    if query.softcap is not None:
        found = query.softcap * (found / query.softcap).tanh()
    if "logn" in slots.meta:
        found = found + slots.meta["logn"][:, :, None, None].to(dtype)
    if traits.temperature != 1:
        found = found / traits.temperature
    return found.masked_fill(~visible(query, slots)[:, :, None], float("-inf"))


def probabilities(query: Query, slots: Slots, block: int) -> Iterator[tuple[Query, Tensor, Tensor]]:
    """Yield the queries in blocks, with their logits and probabilities over slots.

    Yields:
        The block, logits and probabilities [B, H, G, n, S]; rows of a query that sees nothing are
        zero.
    """
    for start in range(0, query.count, block):
        part = query.narrow(start, min(start + block, query.count))
        found = logits(part, slots)
        yield part, found, found.softmax(-1).nan_to_num(0.0)


def _joined(views: Sequence[View]) -> View:
    start: int | None = views[0].start
    reached = start
    for view in views:
        if view.start is None or reached != view.start:
            start = None
        reached = None if reached is None else reached + view.width
    below = [view.below for view in views if view.below is not None]
    known = max(below) if len(below) == len(views) else None
    return View(join([view.slots for view in views]), start, below=known)


def _part(query: Query, view: View) -> tuple[Tensor, Tensor]:
    """Return attention over one view, [B, Hq, n, Dv], and its log-sum-exp [B, Hq, n]."""
    found = logits(query, view.slots, view.traits)
    lse = found.logsumexp(-1)
    weights = (found - lse.where(lse.isfinite(), 0)[..., None]).exp()
    v = view.slots.v.to(found.dtype)
    shared = len(v) == 1 < len(found)
    products = "bhgns,hsd->bhgnd" if shared else "bhgns,bhsd->bhgnd"
    out = torch.einsum(products, weights, v[0] if shared else v)
    return out.flatten(1, 2), lse.flatten(1, 2) * view.traits.lse_scale


def _over_codes(query: Query, view: View) -> Tensor | None:
    """Return attention over codes as they are; None where they have to be decoded."""
    held = view.source
    if not isinstance(held, Unread) or query.count > 1 or query.mask is not None:
        return None
    found = None
    if _sees_all(query, view):
        found = _attended_codes(query.q[:, :, 0], query.scale, held)
    if found is None:
        return None
    outs, lses, rest = found
    if rest is not None:
        out, lse = _part(query, View(rest))
        outs, lses = [*outs, out[:, :, 0]], [*lses, lse[:, :, 0]]
    return lse_merge(outs, lses)[0][:, :, None].to(query.q.dtype)


def _attended_codes(
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
    if not coded or not all(_is_kivi(q, each) for each in coded):
        return None
    found = [_over_kivi(q, scale, each) for each in coded]
    rest = [_uncoded(s) if isinstance(s, Coded) else s.read() for s in held.segments]
    parts = [part for part in [*rest, held.tail] if part is not None]
    outs, lses = zip(*found, strict=True)
    return list(outs), list(lses), join(parts) if parts else None


def _is_kivi(q: Tensor, segment: Coded) -> bool:
    """Return whether a kernel attends to a segment: coded as in KIVI, and a slot is one token."""
    k, v = segment.k, segment.v
    if not isinstance(k, Quantized) or not isinstance(v, Quantized) or "logn" in segment.meta:
        return False
    kept = k.grid.of is None and v.grid.of is None and v.grid.each == 1
    if not kept or k.codec.along != "tokens" or v.codec.along != "channels":
        return False
    same = q.dtype == k.dtype == v.dtype and q.shape[2] == k.size
    each = k.grid.each, v.codec.width(v.size)
    sizes = k.size, v.size
    return same and can_attend(q, k.codes, v.codes, k.codec.bits, v.codec.bits, *each, sizes)


def _over_kivi(q: Tensor, scale: float, segment: Coded) -> tuple[Tensor, Tensor]:
    """Return attention over the slots of a segment whose values are coded, and its log-sum-exp."""
    k, v = segment.k, segment.v
    assert isinstance(k, Quantized)
    assert isinstance(v, Quantized)
    codes = k.codes, k.grid.values, v.codes, v.grid.values
    bits = int(k.codec.bits), int(v.codec.bits)
    groups = k.grid.each, v.codec.width(v.size)
    middles = -k.codec.intervals / 2, -v.codec.intervals / 2
    return attn_decode_kivi(q, *codes, scale, *bits, *groups, *middles)


def _uncoded(segment: Coded) -> Slots | None:
    """Return the slots of a segment whose values are not coded; None if all are."""
    if segment.exact is None or not segment.exact.shape[2]:
        return None
    first = segment.size - segment.exact.shape[2]
    late = torch.arange(first, segment.size, device=segment.exact.device)
    return segment.read_at(late.expand(*segment.exact.shape[:2], -1))


def _over_list(query: Query, view: View) -> Tensor | None:
    """Return attention over chosen slots where they are; None where they have to be gathered."""
    held, q = view.source, query.q
    if not isinstance(held, Listed) or "logn" in held.slots.meta:
        return None
    if query.mask is not None or query.window is not None:
        return None
    if query.causal and (query.pos is not None or query.start < held.below - 1):
        return None
    if not decode.takes(q, held.slots.k, held.slots.v):
        return None
    return decode.attn_decode(q, held.slots.k, held.slots.v, query.scale, held.places())[0]


def _by_kernel(query: Query, view: View) -> Tensor | None:
    """Return attention of a few queries to all slots, those up to their own or a window of them.

    None where the kernel does not run, or which slots are seen takes a mask to say.
    """
    slots, offset, window = view.slots, None, 0
    if query.mask is not None or "logn" in slots.meta:
        return None
    if not decode.takes(query.q, slots.k, slots.v):
        return None
    if not _sees_all(query, view):
        if view.start is None or query.pos is not None or not query.causal:
            return None
        offset, window = query.start - view.start, query.window or 0
        is_blind = offset < 0 or (window and offset + query.count - window >= view.width)
        if is_blind:  # plain attention gives a mean there, the kernel zeros
            return None
    return decode.attn_decode(query.q, slots.k, slots.v, query.scale, None, offset, window)[0]


def _fused(query: Query, view: View) -> Tensor:
    """Return attention through the fused kernel, called as transformers calls it."""
    slots, q = view.slots, query.q
    (batch, heads), count = slots.k.shape[:2], q.shape[2]
    groups = q.shape[1] // heads
    seen = _seen(query, view)
    bias = None if isinstance(seen, str) else seen
    if "logn" in slots.meta:
        many = slots.meta["logn"][:, :, None].to(q.dtype)
        if seen is None:
            bias = many
        else:
            bias = visible(query, slots) if bias is None else bias
            bias = many.where(bias, torch.finfo(q.dtype).min)
    k, v, grouped = slots.k, slots.v, False
    if groups > 1:
        # Where slots are not all those there ever were, nothing of transformers is matched bit for
        # bit, and one query is several times faster as rows than by the kernel's own grouping.
        as_rows = view.start is None and count == 1
        if bias is None and k.shape[3] == v.shape[3] <= 256 and not as_rows:
            grouped = True
        elif count == 1:  # the queries of a head stand where several queries of one would
            q = q.reshape(len(q), heads, groups, q.shape[3])
        else:
            k, v = _repeat(k, groups), _repeat(v, groups)
            if bias is not None and bias.shape[1] > 1:
                bias = bias.repeat_interleave(groups, 1)
    if batch < len(q):
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    is_causal = bias is None and seen == _CAUSAL
    out = scaled_dot_product_attention(
        q, k, v, bias, is_causal=is_causal, scale=query.scale, enable_gqa=grouped
    )
    return out.reshape(len(q), heads * groups, count, v.shape[3])


def _seen(query: Query, view: View) -> Tensor | str | None:
    """Return which slots are seen, None for all of them, or `_CAUSAL`.

    Nothing is read from the device: all that a fused kernel without a mask takes is known of a
    view beforehand.
    """
    width, start, mask = view.slots.k.shape[2], view.start, query.mask
    simple = start is not None and query.window is None and query.pos is None
    if mask is not None:
        if simple and start == 0 and mask.shape[-1] == width:
            return mask
    elif _sees_all(query, view):
        return None
    elif simple and query.causal and query.start == start and query.q.shape[2] == width:
        return _CAUSAL
    seen = visible(query, view.slots)
    return seen | ~seen.any(-1, keepdim=True)  # not NaN where nothing is seen


def _sees_all(query: Query, view: View) -> bool:
    """Return whether every query is known to see every slot."""
    below = view.below if view.start is None else view.start + view.width
    if below is None:
        return False
    if query.pos is not None:
        return not query.causal and query.window is None
    last = query.start + query.q.shape[2] - 1
    cut = query.window is not None and last - query.window >= (view.start or 0)
    return not cut and (not query.causal or query.start >= below - 1)


def _repeat(x: Tensor, groups: int) -> Tensor:
    batch, heads, width, size = x.shape
    wide = x[:, :, None].expand(-1, -1, groups, -1, -1)
    return wide.reshape(batch, heads * groups, width, size)

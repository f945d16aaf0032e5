"""Attention of queries over slots whose metadata say who sees what; parts merge by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diffcache.kernels import decode
from diffcache.kernels.dense import scaled_dot_product_attention
from diffcache.kernels.merge import lse_merge
from diffcache.kv.coded import attend_coded
from diffcache.kv.segment import PLAIN, Listed, Traits, Unread
from diffcache.kv.slots import Slots, join

_CAUSAL = "causal"


@dataclass(frozen=True)
class View:
    """Slots as queries meet them, keys rotated.

    Attributes:
        source: Slots that are attended to; codes are decoded, and chosen slots gathered, when
            `slots` is first asked for.
        start: The first position where no slot is empty, every slot stands for one token and
            positions follow one another in every row; None otherwise.
        traits: Temperature and merging of the logits of these slots.
        below: Bound above all positions, where no slot is empty; None where it is not known.
    """

    source: Slots | Unread | Listed
    start: int | None = None
    traits: Traits = PLAIN
    below: int | None = None

    @cached_property
    def slots(self) -> Slots:
        """Slots that are attended to, decoded or gathered."""
        return self.source if isinstance(self.source, Slots) else self.source.read()

    @property
    def width(self) -> int:
        """Slots a row, empty ones included."""
        return self.source.width


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
    whole = query.softcap is None and query.sinks is None
    if whole and all(view.traits == PLAIN for view in views):
        view = views[0] if len(views) == 1 else _joined(views)
        for way in (_over_codes, _over_list, _by_kernel):
            found = way(query, view)
            if found is not None:
                return found
        return _fused(query, view)
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
    out = torch.einsum("bhgns,hsd->bhgnd" if shared else "bhgns,bhsd->bhgnd",
                       weights, v[0] if shared else v)  # fmt: skip
    return out.flatten(1, 2), lse.flatten(1, 2) * view.traits.lse_scale


def _over_codes(query: Query, view: View) -> Tensor | None:
    """Return attention over codes as they are; None where they have to be decoded."""
    if query.count > 1 or query.mask is not None or not isinstance(view.source, Unread):
        return None
    if not _sees_all(query, view):
        return None
    found = attend_coded(query.q[:, :, 0], query.scale, view.source)
    if found is None:
        return None
    outs, lses, rest = found
    if rest is not None:
        out, lse = _part(query, View(rest))
        outs, lses = [*outs, out[:, :, 0]], [*lses, lse[:, :, 0]]
    return lse_merge(outs, lses)[0][:, :, None].to(query.q.dtype)


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
    batch, heads = slots.k.shape[:2]
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
        as_rows = view.start is None and query.count == 1
        if bias is None and k.shape[3] == v.shape[3] <= 256 and not as_rows:
            grouped = True
        elif query.count == 1:  # the queries of a head stand where several queries of one would
            q = q.reshape(len(q), heads, groups, q.shape[3])
        else:
            k, v = _repeat(k, groups), _repeat(v, groups)
            if bias is not None and bias.shape[1] > 1:
                bias = bias.repeat_interleave(groups, 1)
    if batch < len(q):
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    out = scaled_dot_product_attention(
        q, k, v, bias, is_causal=bias is None and seen == _CAUSAL, scale=query.scale,
        enable_gqa=grouped,
    )  # fmt: skip
    return out.reshape(len(q), heads * groups, query.count, v.shape[3])


def _seen(query: Query, view: View) -> Tensor | str | None:
    """Return which slots are seen, None for all of them, or `_CAUSAL`.

    Nothing is read from the device: all that a fused kernel without a mask takes is known of a
    view beforehand.
    """
    width, start, mask = view.width, view.start, query.mask
    simple = start is not None and query.window is None and query.pos is None
    if mask is not None:
        if simple and start == 0 and mask.shape[-1] == width:
            return mask
    elif _sees_all(query, view):
        return None
    elif simple and query.causal and query.start == start and query.count == width:
        return _CAUSAL
    seen = visible(query, view.slots)
    return seen | ~seen.any(-1, keepdim=True)  # not NaN where nothing is seen


def _sees_all(query: Query, view: View) -> bool:
    """Whether every query is known to see every slot."""
    below = view.below if view.start is None else view.start + view.width
    if below is None:
        return False
    if query.pos is not None:
        return not query.causal and query.window is None
    last = query.start + query.count - 1
    cut = query.window is not None and last - query.window >= (view.start or 0)
    return not cut and (not query.causal or query.start >= below - 1)


def _repeat(x: Tensor, groups: int) -> Tensor:
    batch, heads, width, size = x.shape
    wide = x[:, :, None].expand(-1, -1, groups, -1, -1)
    return wide.reshape(batch, heads * groups, width, size)

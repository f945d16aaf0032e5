"""Attention of queries over slots whose metadata say who sees what; parts merge by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from diffcache.kernels import attention
from diffcache.kernels.attention import Codes, Held, attn_forward
from diffcache.kernels.coded import ATTEND, attn_decode_kivi, can_attend
from diffcache.kernels.dense import scaled_dot_product_attention
from diffcache.kernels.merge import lse_merge
from diffcache.kv.segment import PLAIN, Coded, Traits
from diffcache.kv.slots import Slots, join
from diffcache.kv.view import ListedView, Piece, Unread, View

_CAUSAL = "causal"
Groups = Literal["mean", "max", "sum"]


def over_groups(x: Tensor, groups: Groups) -> Tensor:
    """Reduce [B, H, G, ...] over the query heads of a key-value head."""
    if groups == "max":
        return x.amax(2)
    return x.sum(2) if groups == "sum" else x.mean(2)


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
        return replace(self, q=self.q[:, :, start:stop], start=self.start + start, pos=pos, mask=mask)

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
    return attend_noting(query, views, note=False)[0]


def attend_noting(query: Query, views: Sequence[View], *, note: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return what `attend` does, and float32 [B, Hq, n], log-sum-exps of queries, -inf where nothing is seen.

    They are None where no kernel has them. `note` says whether they are wanted: dense attention takes the kernel then.
    """
    if not views:
        raise ValueError("views=[]: there is nothing to attend to; write keys and values first")
    plain = query.softcap is None and query.sinks is None
    for view in views:
        plain = plain and view.traits == PLAIN
    if plain:
        view = views[0] if len(views) == 1 else _joined(views)
        found = _by_kernel(query, view, note)
        if found is None and not note:
            found = _by_products(query, view)
        return (_fused(query, view), None) if found is None else found
    out, lse = attend_parts(query, views)
    # A sink adds exp(sink) to what the softmax divides by, and nothing to the sum of values.
    if query.sinks is not None:
        sinks = query.sinks.to(lse.dtype).view(1, -1, 1)
        out = out * (lse - torch.logaddexp(lse, sinks)).exp()[..., None]
    return out.to(query.q.dtype), None


def attend_parts(query: Query, views: Sequence[View]) -> tuple[Tensor, Tensor]:
    """Return attention [B, Hq, n, Dv] without sinks, and log-sum-exps [B, Hq, n], in float32 at least."""
    plain = [view for view in views if not view.traits.apart]
    parts = ([_joined(plain)] if plain else []) + [view for view in views if view.traits.apart]
    outs, lses = zip(*(_part(query, view) for view in parts), strict=True)
    return lse_merge(outs, lses)


def visible(query: Query, pos: Tensor) -> Tensor:
    """Return which slots at positions [B, 1 or H, S] queries see, bool [B, 1 or H, n or 1, S], 1 for all alike."""
    pos = pos.long()
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
        width = known.shape[-1]  # the mask is over positions, slots stand in any order
        place = here.clamp(0, width - 1).expand(len(known), -1, query.count, -1)
        seen = seen & known.gather(3, place) & (here < width)
    if query.window is not None:
        seen = seen & (here > at - query.window)
    return seen


def logits(query: Query, slots: Slots, traits: Traits = PLAIN) -> Tensor:
    """Return the logits of queries over slots, [B, H, G, n, S] in float32 at least, -inf where unseen."""
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
    return found.masked_fill(~visible(query, slots.pos)[:, :, None], float("-inf"))


def probabilities(query: Query, slots: Slots, block: int) -> Iterator[tuple[Query, Tensor, Tensor]]:
    """Yield blocks of queries, their logits and probabilities [B, H, G, n, S]; rows of one that sees nothing are 0."""
    for start in range(0, query.count, block):
        part = query.narrow(start, min(start + block, query.count))
        found = logits(part, slots)
        yield part, found, softmax(found, query.sinks).nan_to_num(0.0)


def softmax(found: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of logits [B, H, G, n, S]; sinks [H * G], None for none, take a part that no slot gets."""
    if sinks is None:
        return found.softmax(-1)
    beside = sinks.to(found.dtype).view(*found.shape[1:3], 1, 1).expand(*found.shape[:-1], 1)
    return torch.cat([found, beside], -1).softmax(-1)[..., :-1]


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
    if query.softcap is None and attention.FORWARD.takes(query.q):
        cooled = replace(query, scale=query.scale / view.traits.temperature)
        if (parts := _parts(cooled, view, limits(query, view))) is not None:
            out, lse = lse_merge(*parts)
            return out.float(), lse * view.traits.lse_scale
    found = logits(query, view.slots, view.traits)
    lse = found.logsumexp(-1)
    # Where nothing is seen lse is -inf, and -inf less -inf would be NaN; so all weights are exp(-inf) = 0.
    weights = (found - lse.where(lse.isfinite(), 0)[..., None]).exp()
    v = view.slots.v.to(found.dtype)
    shared = len(v) == 1 < len(found)
    products = "bhgns,hsd->bhgnd" if shared else "bhgns,bhsd->bhgnd"
    out = torch.einsum(products, weights, v[0] if shared else v)
    return out.flatten(1, 2), lse.flatten(1, 2) * view.traits.lse_scale


def limits(query: Query, view: View, opened: bool = False) -> dict[str, Any]:
    """Return what says which slots queries see, as kernels take it; nothing is decoded.

    Where `opened` is True, a query that would see nothing sees everything.

    Returns:
        Nothing where all slots are seen, `offset` and `window`, or else a `mask`.
    """
    if is_open(query, view):
        return {}
    if view.start is not None and query.pos is None and query.mask is None and query.causal:
        # Slots stand in the order of positions, so that two numbers say it, and no mask is read.
        offset, window = query.start - view.start, query.window or 0
        is_blind = offset < 0 or (window and offset + query.count - window >= view.width)
        if not opened or not is_blind:
            return {"offset": offset, "window": window}
    seen = visible(query, view.meta["pos"])
    return {"mask": seen | ~seen.any(-1, keepdim=True) if opened else seen}


def is_open(query: Query, view: View) -> bool:
    """Return whether every query is known to see every slot, but those that a list leaves out."""
    if query.mask is not None:
        return False
    below = view.source.below if isinstance(view.source, ListedView) else None
    if below is None or query.pos is not None or query.window is not None:
        return _sees_all(query, view)
    return not query.causal or query.start >= below - 1


def _by_kernel(query: Query, view: View, note: bool) -> tuple[Tensor, Tensor | None] | None:
    """Return attention over slots as they are held, and its log-sum-exp.

    None where kernels do not run, or torch's own attention is taken: over exact slots that are all
    there, unless log-sum-exps are wanted, or which slots are seen would take it a mask to say and
    takes the kernel an offset.
    """
    generated = query.count == 1 and isinstance(view.source, Unread) and ATTEND.takes(query.q)
    if not generated and not attention.FORWARD.takes(query.q):
        return None
    seen = limits(query, view, opened=True)
    triangle = query.count == view.width and seen == {"offset": 0, "window": 0}
    if isinstance(view.source, Slots) and not note and (triangle or "offset" not in seen):
        return None
    parts = _parts(query, view, seen)
    if parts is None:
        return None
    out, lse = lse_merge(*parts)
    # An opened mask shows everything to queries that see nothing; scorers must not count them.
    if note and "mask" in seen:
        blind = ~visible(query, view.meta["pos"]).any(-1)
        groups = lse.shape[1] // blind.shape[1] if blind.shape[1] > 1 else 1
        lse = lse.masked_fill(blind.repeat_interleave(groups, 1), -torch.inf)
    return out.to(query.q.dtype), lse


def _parts(query: Query, view: View, seen: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return attention over each part of a view, and its log-sum-exp; None without kernels. `seen` is of `limits`."""
    if "logn" in view.meta:
        return None
    found = _pieces(query, view, seen)
    if found is None:
        return None
    pieces, limited = found
    outs, lses = [], []
    for first, stop, k, v in pieces:  # what limits all slots is cut to those of the piece
        own = dict(limited)
        if "offset" in own:
            own["offset"] -= first
        for name, axis in (("mask", 3), ("turns", 2)):
            if name in own and len(pieces) > 1:
                own[name] = own[name].narrow(axis, first, stop - first)
        kivi = _is_kivi(query, k, v, own)
        if isinstance(k, Codes) and not kivi:
            k = k._replace(codes=k.codes[:, :, : stop - first])
        names = "turns", "slots", "mask", "interleaved"
        given = {name: own[name] for name in names if name in own}
        known = kivi or attention.takes(query.q, k, v, **given)
        if not known and (query.count > 1 or isinstance(k, Codes)):
            return None
        run: Any = _over_kivi if kivi else attn_forward
        out, lse = run(query.q, k, v, query.scale, **own)
        outs.append(out.float() if query.count == 1 else out)
        lses.append(lse)
    return outs, lses


def _pieces(query: Query, view: View, seen: dict[str, Any]) -> tuple[list[Piece], dict[str, Any]] | None:
    """Return the parts of what is held and what limits them; None where nothing is gained."""
    source = view.source
    if isinstance(source, Slots):
        return [(0, source.width, source.k, source.v)], seen
    if isinstance(source, ListedView):
        whole = source.slots
        return [(0, source.width, whole.k, whole.v)], seen | {"slots": source.places()}
    turns, pieces = source.turns(query.q), source.pieces()
    turned = source.rotary is not None
    if turned != bool(turns) or not (turned or any(isinstance(k, Codes) for _, _, k, _ in pieces)):
        return None  # what other codecs hold is decoded once, for all that read it
    exact = [(k, v) for _, _, k, v in pieces if isinstance(k, Tensor) and isinstance(v, Tensor)]
    if query.count == 1 and not seen and not turns and len(exact) > 1:  # little: in one launch
        k, v = (torch.cat(part, 2) for part in zip(*exact, strict=True))
        pieces = [*(piece for piece in pieces if isinstance(piece[2], Codes)), (0, 0, k, v)]
    return pieces, seen | turns


def _is_kivi(query: Query, k: Held, v: Held, seen: dict[str, Any]) -> bool:
    """Return whether the kernel of one query over codes of KIVI's kind should run."""
    if seen or query.count > 1 or not isinstance(k, Codes) or not isinstance(v, Codes):
        return False
    return k.width == v.each == 1 and can_attend(
        query.q[:, :, 0], k.codes, v.codes, k.bits, v.bits, k.each, v.width, (k.size, v.size)
    )


def _over_kivi(q: Tensor, k: Any, v: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention of one query over codes, and its log-sum-exp."""
    out, lse = attn_decode_kivi(
        q[:, :, 0], k.codes, k.grid, v.codes, v.grid, scale, k.bits, v.bits, k.each, v.width, k.shift, v.shift
    )
    return out[:, :, None], lse[:, :, None]


def _by_products(query: Query, view: View) -> tuple[Tensor, None] | None:
    """Return attention of one query over codes, multiplied as they are held; None elsewhere.

    On a CPU, where writing what codes stand for into memory costs more than the products with it.
    """
    source, q = view.source, query.q
    if not isinstance(source, Unread) or source.tail is None or q.device.type != "cpu":
        return None
    direct = any(isinstance(x, Coded) and (x.k.direct or x.v.direct) for x in source.segments)
    if query.count > 1 or not direct or "logn" in source.meta or not is_open(query, view):
        return None
    dtype = torch.promote_types(q.dtype, torch.float32)
    asked = query.grouped(source.tail.k.shape[1])[:, :, :, 0].to(dtype) * query.scale
    keys, values = source.held()
    logits = [asked @ k.to(dtype).mT if isinstance(k, Tensor) else k.dot(asked) for _, k in keys]
    weights = torch.cat(logits, 3).softmax(3).split([count for count, _ in values], 3)
    sums = [
        some @ v.to(dtype) if isinstance(v, Tensor) else v.mix(some)
        for some, (_, v) in zip(weights, values, strict=True)
    ]
    out = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
    return out.flatten(1, 2)[:, :, None].to(q.dtype), None


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
            bias = visible(query, slots.pos) if bias is None else bias
            bias = many.where(bias, torch.finfo(q.dtype).min)  # not -inf, of which a row of NaN comes
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
    out = scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal, scale=query.scale, enable_gqa=grouped)
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
    seen = visible(query, view.slots.pos)
    return seen | ~seen.any(-1, keepdim=True)  # not NaN where nothing is seen


def _sees_all(query: Query, view: View) -> bool:
    """Return whether every query is known to see every slot."""
    below = view.below if view.start is None else view.start + view.width
    if below is None:
        return False
    if query.pos is not None:
        return not query.causal and query.window is None
    last = query.start + query.q.shape[2] - 1
    # The last query sees positions above last - window; earlier ones see further back.
    cut = query.window is not None and last - query.window >= (view.start or 0)
    return not cut and (not query.causal or query.start >= below - 1)


def _repeat(x: Tensor, groups: int) -> Tensor:
    batch, heads, width, size = x.shape
    wide = x[:, :, None].expand(-1, -1, groups, -1, -1)
    return wide.reshape(batch, heads * groups, width, size)

"""Chelsea: cluster keys by soft matching within chunks; centroids count their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import work_dtype
from diffcache.kv.merge import Merger
from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, ranks
from diffcache.kv.settings import Several, Whole
from diffcache.kv.slots import Slots, chosen


@dataclass
class _Clusters:
    """Slots that may be merged, those that are left, in order of position.

    Attributes:
        slot: Number of each slot in the layer, int64 [B, H, M].
        there: Bool [B, H, M]; False where a row is filled up.
        k: [B, H, M, D].
        v: [B, H, M, Dv].
        count: Tokens of each slot, [B, H, M].
        grown: True for slots that took over others, bool [B, H, M].
    """

    slot: Tensor
    there: Tensor
    k: Tensor
    v: Tensor
    count: Tensor
    grown: Tensor


@dataclass(frozen=True)
class SoftMatching(Merger):
    """Merge the most similar keys of alternating sets within chunks, until a row fits its budget.

    In a chunk every other slot belongs to A, the rest to B; each of A meets the most similar key
    of B, and the most similar pairs of the row become one, the mean of all their tokens. That is
    repeated with what is left. A centroid counts as many times as it has tokens.

    Reference: Chelsea, arXiv 2506.11418; there is no official code. Centroids keep the
    place of their member in B.

    Args:
        chunk: Slots of a chunk.
        sinks: First tokens that are never merged.
        recent: Last tokens that are never merged.
        count: Have centroids count as many times as they have tokens.
        space: Whether keys are merged rotated, as cached, or unrotated.
    """

    chunk: Several = 32
    sinks: Whole = 0
    recent: Whole = 0
    count: bool = True
    space: Literal["post", "pre"] = "post"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return centroids and a plan that keeps them, as many as the given one keeps."""
        slots = seen.slots
        valid = slots.valid.expand(plan.shape)
        budget = ((plan >= KEEP) & valid).sum(-1)
        need = valid.sum(-1) - budget
        if not bool((need > 0).any()):
            return slots, plan
        place = torch.arange(slots.width, device=plan.device)
        order = place - seen.pad[..., None]
        free = valid & (order >= self.sinks) & (place < slots.width - self.recent)
        free = free & (need[..., None] > 0)
        left = self._clustered(slots, free, need)
        keep = _put(valid & ~free, left, left.there)
        # Rows whose centroids are more than the budget (all is protected) lose the oldest slots.
        keep &= ranks(place.expand_as(plan).float().masked_fill(~keep, -1)) < budget[..., None]
        return self._written(slots, left), torch.where(keep, KEEP, DROP).to(plan.dtype)

    def _clustered(self, slots: Slots, free: Tensor, need: Tensor) -> _Clusters:
        """Return what is left of the slots that may be merged."""
        index, there = chosen(free)
        work = work_dtype(slots.k.dtype)
        logn = slots.column("logn").expand(free.shape)
        count = logn.gather(2, index).exp().to(work)
        k, v = (gather_slots(x, index).to(work) for x in (slots.k, slots.v))
        now = _Clusters(index, there, k, v, count, torch.zeros_like(there))
        while bool((need > 0).any()):
            gone = self._round(now, need)
            if not bool(gone.any()):
                break
            need = need - gone.sum(-1)
            index, there = chosen(now.there & ~gone)
            slot, count, grown = (x.gather(2, index) for x in (now.slot, now.count, now.grown))
            k, v = (gather_slots(x, index) for x in (now.k, now.v))
            now = _Clusters(slot, there, k, v, count, grown)
        return now

    def _round(self, now: _Clusters, need: Tensor) -> Tensor:
        """Merge pairs once, in place; return which slots are gone, bool [B, H, M]."""
        width = now.slot.shape[2]
        short = -width % self.chunk
        there = pad(now.there, (0, short)).unflatten(2, (-1, self.chunk))
        unit = pad(normalize(now.k, dim=-1), (0, 0, 0, short)).unflatten(2, (-1, self.chunk))
        alike = unit[..., 0::2, :] @ unit[..., 1::2, :].transpose(-1, -2)
        both = there[..., 0::2, None] & there[..., None, 1::2]
        best = alike.masked_fill(~both, float("-inf")).max(-1)
        likeness = best.values.flatten(2)
        first = torch.arange(there.shape[2], device=need.device)[:, None] * self.chunk
        a = first + torch.arange(0, self.chunk, 2, device=need.device)
        b = (first + 2 * best.indices + 1).flatten(2)
        a = a.flatten().expand_as(b)
        merged = (ranks(likeness) < need[..., None]) & likeness.isfinite()
        gone = torch.zeros_like(there.flatten(2)).scatter(2, a, merged)[..., :width]
        a, b = a.clamp_max(width - 1), b.clamp_max(width - 1)
        count = now.count.gather(2, a) * merged
        whole = now.count.scatter_add(2, b, count)
        hit = torch.zeros_like(whole).scatter_add(2, b, merged.to(whole.dtype)) > 0
        for name in ("k", "v"):
            x = getattr(now, name)
            more = gather_slots(x, a) * count[..., None]
            new = (x * now.count[..., None]).scatter_add(2, b[..., None].expand_as(more), more)
            setattr(now, name, torch.where(hit[..., None], new / whole[..., None], x))
        now.count, now.grown = whole, now.grown | hit
        return gone

    def _written(self, slots: Slots, left: _Clusters) -> Slots:
        """Return slots with their centroids; what was not merged is as it was, bit for bit."""
        before = slots.column("logn").expand(slots.k.shape[:3]).float()
        hit = left.there & left.grown
        meta = dict(slots.meta)
        if self.count:
            logn = left.count.log().float().where(hit, before.gather(2, left.slot))
            meta["logn"] = _put(before, left, logn)
        columns = {}
        for name, x, new in (("k", slots.k, left.k), ("v", slots.v, left.v)):
            fresh = new.to(x.dtype).where(hit[..., None], gather_slots(x, left.slot))
            columns[name] = _put(x, left, fresh)
        return replace(slots, k=columns["k"], v=columns["v"], meta=meta)


def _put(x: Tensor, left: _Clusters, new: Tensor) -> Tensor:
    """Return [B, H, S, ...] with what is left written to its slots; fillers write nothing."""
    width = x.shape[2]
    longer = torch.cat([x, x.new_zeros(*x.shape[:2], 1, *x.shape[3:])], 2)
    slot = left.slot.where(left.there, width)
    if x.dim() == 4:
        slot = slot[..., None].expand_as(new)
    return longer.scatter(2, slot, new)[:, :, :width]

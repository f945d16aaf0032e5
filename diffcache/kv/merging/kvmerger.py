"""KVMerger: neighbors whose keys are alike become one, weighted by a Gaussian kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import work_dtype
from diffcache.kv.merge import Merger
from diffcache.kv.merging.absorb import Match, absorb, total
from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, protected, ranks
from diffcache.kv.settings import Cosine, Whole
from diffcache.kv.slots import Slots


@dataclass(frozen=True)
class ContiguousMerge(Merger):
    """Merge runs of consecutive slots whose keys are alike, until a row fits its budget.

    The slot of a set with the highest score is its pivot and keeps its place. Member i weighs
    exp(-|k_p - k_i|^2 / (2 s^2)), with s the mean distance of the other members to the pivot.

    Reference: KVMerger, arXiv 2407.08454. The paper fixes the threshold and
    lets the length follow; here the links of the highest cosine above the threshold are closed
    until the row holds what its budget says, and where there are too few of them the sets of the
    least score are dropped.

    Args:
        threshold: Cosine of neighbors above which they may be merged.
        sinks: First tokens that are never merged.
        recent: Last tokens that are never merged.
        count: Have a merged slot count as many times as it has members; the paper does not.
        space: Whether keys are merged rotated, as cached, or unrotated.
    """

    threshold: Cosine = 0.75
    sinks: Whole = 0
    recent: Whole = 0
    count: bool = False
    space: Literal["post", "pre"] = "post"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return merged slots and a plan that keeps the pivots, as many as the given one keeps."""
        slots = seen.slots
        valid = slots.valid.expand(plan.shape)
        budget = ((plan >= KEEP) & valid).sum(-1, keepdim=True)
        need = valid.sum(-1, keepdim=True) - budget
        if not bool((need > 0).any()):
            return slots, plan
        guarded = protected(score, seen, self.sinks, self.recent)
        joined = self._links(slots.k, valid & ~guarded.isposinf(), need)
        sets = (~joined).cumsum(-1) - 1  # of each slot, ascending from 0
        width = slots.width
        worth = score.masked_fill(~valid, float("-inf"))
        best = worth.new_full(worth.shape, float("-inf"))
        best = best.scatter_reduce(2, sets, worth, "amax")
        place = torch.arange(width, device=score.device).expand_as(sets)
        leads = valid & (worth == best.gather(2, sets))
        pivot = torch.full_like(sets, width).scatter_reduce(2, sets, place.where(leads, width), "amin")
        pivot = pivot.gather(2, sets).clamp_max(width - 1)
        is_pivot = (pivot == place) & valid
        after = torch.cat([joined[..., 1:], torch.zeros_like(joined[..., :1])], -1)
        slots = self._absorb(slots, pivot, valid & (joined | after))  # those in a set of several
        rank = ranks(guarded.masked_fill(~is_pivot, float("-inf")))
        keep = is_pivot & (rank < budget)
        return slots, torch.where(keep, KEEP, DROP).to(plan.dtype)

    def _links(self, k: Tensor, free: Tensor, need: Tensor) -> Tensor:
        """Return which slots are merged with the one before them, bool [B, H, S]."""
        unit = normalize(k.to(work_dtype(k.dtype)), dim=-1)
        alike = (unit[:, :, 1:] * unit[:, :, :-1]).sum(-1)
        usable = free[..., 1:] & free[..., :-1] & (alike > self.threshold)
        rank = ranks(alike.masked_fill(~usable, float("-inf")))
        closed = usable & (rank < need)
        return torch.cat([torch.zeros_like(closed[..., :1]), closed], -1)

    def _absorb(self, slots: Slots, pivot: Tensor, member: Tensor) -> Slots:
        """Return slots in which pivots have taken over the members of their sets."""
        place = torch.arange(slots.width, device=pivot.device).expand_as(pivot)
        k = slots.k.to(work_dtype(slots.k.dtype))
        square = (k - gather_slots(k, pivot)).square().sum(-1)
        match = Match(place, pivot, member & (place != pivot), torch.zeros_like(square))
        many = total(match, torch.ones_like(square), slots.width)
        mean = total(match, square.sqrt(), slots.width) / many.clamp_min(1)
        scale = mean.gather(2, pivot).clamp_min(torch.finfo(k.dtype).tiny ** 0.5)
        weight = (-square / (2 * scale.square())).exp()
        merged = absorb(slots, match, weight, weight.new_ones(()))
        if not self.count:
            return merged
        logn = slots.column("logn").expand(pivot.shape)
        tokens = logn.exp() + total(match, logn.exp().to(weight.dtype), slots.width).float()
        return replace(merged, meta={**slots.meta, "logn": tokens.log().where(many > 0, logn)})

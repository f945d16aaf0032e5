"""EMS: evict what matters least, merge what is left over into centers or into nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.merge import Merger
from diffcache.kv.merging.absorb import absorb, by_cosine, parted
from diffcache.kv.observe import Observation
from diffcache.kv.plan import ranks
from diffcache.kv.settings import Cosine, NotNegative
from diffcache.kv.slots import Slots


@dataclass(frozen=True)
class ZeroClassMerge(Merger):
    """Evict, then merge: of what goes, the better part joins the most similar kept key.

    Candidates that are like no center join the zero class, whose center is zero and is not kept:
    they vanish, at the same cost for every head. Merged slots weigh as much as their scores.

    Reference: EMS, arXiv 2412.08521. There is no official code: the share of
    candidates and the threshold are settings here, and the weights are the scores.

    Args:
        reach: Candidates of a row for each slot it keeps; what ranks below them is evicted.
        threshold: Cosine below which a candidate belongs to the zero class.
        space: Whether keys are merged rotated or unrotated.
    """

    reach: NotNegative = 1.0
    threshold: Cosine = 0.6
    space: Literal["post", "pre"] = "post"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with candidates merged in, and the plan as it is."""
        slots = seen.slots
        goes, stays = parted(slots, plan)
        if not bool(goes.any()):
            return slots, plan
        allowed = (stays.sum(-1, keepdim=True) * self.reach).long()
        candidate = goes & (ranks(score.masked_fill(~goes, float("-inf"))) < allowed)
        match = by_cosine(slots.k, candidate, stays)
        match = match.only(match.likeness >= self.threshold)
        worth = score.clamp_min(0).nan_to_num(0, 0, 0).to(match.likeness.dtype)
        top = worth.amax(-1, keepdim=True).clamp_min(torch.finfo(worth.dtype).tiny)
        worth = (worth / top).clamp_min(1e-6)
        return absorb(slots, match, worth.gather(2, match.source), worth), plan

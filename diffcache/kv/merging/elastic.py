"""Elastic Cache: slots that go are averaged into the kept slot nearest to them in position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.merge import Merger
from diffcache.kv.merging.absorb import absorb, by_position, parted
from diffcache.kv.observe import Observation
from diffcache.kv.plan import FixedSlot, Planner
from diffcache.kv.slots import Slots


@dataclass(frozen=True)
class BucketMerge(Merger):
    """Average every slot that goes into the kept slot nearest to it, the anchor of its bucket.

    Reference: Elastic Cache, arXiv 2407.18121. Of two anchors equally far away the
    earlier one is taken, which the paper leaves open.

    Args:
        space: Whether keys are merged rotated, as the official code does, or unrotated.
        ends: First and last tokens that a prompt always keeps, for the official code: it counts
            what goes from the end of the first ones, merges the slots of the same numbers counted
            from the first slot, which may be kept ones, and into no anchor among the ends. None
            merges what goes, into any anchor.
    """

    space: Literal["post", "pre"] = "post"
    ends: tuple[int, int] | None = None

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with their buckets averaged in, and the plan as it is."""
        slots = seen.slots
        goes, stays = parted(slots, plan)
        goes = goes & (goes.sum(-1, keepdim=True) > 1)  # the paper only drops a token's one slot
        if not bool(goes.any()):
            return slots, plan
        if self.ends is not None:
            stays = stays & between(seen, *self.ends)
            goes = goes.roll(-self.ends[0], -1)
        match = by_position(slots.pos, goes, stays)
        ones = torch.ones_like(match.likeness)
        return absorb(slots, match, ones, ones.new_ones(())), plan


def between(seen: Observation, sinks: int, recent: int) -> Tensor:
    """Return which slots are neither empty nor among the first or last, bool [B, H, S]."""
    place = torch.arange(seen.slots.width, device=seen.pad.device)
    return (place >= seen.pad[..., None] + sinks) & (place < seen.slots.width - recent)


@dataclass(frozen=True)
class SingleArgsort(Planner):
    """Hand another plan what one argsort of the scores returns, as if it held ranks.

    It holds slots: what is kept has nothing to do with the scores. The official code does this with
    the slots between the first and the last ones, and keeps one fewer than its budget.

    Reference: Elastic Cache, arXiv 2407.18121, official code.

    Args:
        plan: The other, which always keeps first and last tokens of a prompt.
    """

    plan: FixedSlot

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what becomes of every slot."""
        sinks, recent = self.plan.sinks, self.plan.recent
        middle = between(seen, sinks, recent)
        # Other slots come first and in order, as many before the middle as stand there but for the
        # last ones: from there on the list names slots of the middle.
        order = torch.argsort(score.masked_fill(~middle, float("-inf")), dim=-1, stable=True)
        wrong = order.roll(-recent, -1).to(score.dtype).masked_fill(~seen.valid, float("-inf"))
        first_time = (seen.lengths == seen.tokens) & (budget < seen.lengths)
        return self.plan(wrong, (budget - first_time.long()).clamp_min(1), seen)

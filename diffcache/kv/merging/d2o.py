"""D2O: recall what was evicted if it is like something kept; dense layers hold more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.attended import Attended
from diffcache.kv.budget import Budget, slots_for
from diffcache.kv.budgets.layers import apportion
from diffcache.kv.merge import Merger
from diffcache.kv.merging.absorb import absorb, by_cosine, parted, total
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score
from diffcache.kv.score.revised import Revised
from diffcache.kv.settings import Mode, Share, Size
from diffcache.kv.slots import Slots

_GATE = "d2o_gate"  # the threshold of a row, plus 2, so that 0 is "none yet"
_DENSITY = "d2o_density"


@dataclass(frozen=True)
class EmaMerge(Merger):
    """Merge an evicted slot into the most similar kept key if it is similar enough.

    The threshold is the mean of the first likenesses, and then a moving average of them, kept for
    each row in the metadata of its slots.

    Reference: D2O, arXiv 2406.13035. The paper writes the threshold for one head and
    one token at a time: each row of a batch and head has its own, and where several slots go at
    once it moves by the mean of theirs.

    Args:
        beta: Weight of the newest likeness in the threshold, 0 to 1. The official code has 0.5.
        mode: `"paper"` weighs a slot with e and what it takes over with exp(cosine), all divided by
            their sum. `"official"` weighs a slot with 1 and what it takes over with its cosine, all
            divided by their number, so that norms shrink; the n-th slots that go in each head are
            recalled together, where the mean of their cosines reaches a threshold that all heads
            share.
        space: Whether keys are merged rotated, as the official code does, or unrotated.
    """

    beta: Share = 0.7
    mode: Mode = "paper"
    space: Literal["post", "pre"] = "post"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with what was recalled, and the plan as it is."""
        slots = seen.slots
        goes, stays = parted(slots, plan)
        if not bool(goes.any()):
            return slots, plan
        match = by_cosine(slots.k, goes, stays)
        likeness, found = match.likeness, match.found
        if self.mode == "official":
            heads = found.sum(1, keepdim=True)
            likeness = likeness.where(found, 0).sum(1, keepdim=True) / heads.clamp_min(1)
            likeness, found = likeness.expand_as(match.likeness), (heads > 0).expand_as(found)
        gate, known = self._gate(slots, likeness, found)
        near = match.only(likeness >= gate[..., None])
        if self.mode == "official":
            count = 1 + total(near, torch.ones_like(likeness), slots.width)
            merged = absorb(slots, near, near.likeness, torch.ones_like(count), count)
        else:
            merged = absorb(slots, near, near.likeness.exp(), near.likeness.new_full((), math.e))
        kept = (gate.float() + 2).where(known, 0)[..., None].expand(plan.shape)
        return replace(merged, meta={**merged.meta, _GATE: kept}), plan

    def _gate(self, slots: Slots, likeness: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return the threshold of every row, [B, H], and where there is one by now."""
        many = found.sum(-1)
        mean = likeness.where(found, 0).sum(-1) / many.clamp_min(1)
        before = slots.meta.get(_GATE)
        if before is None:
            return mean, many > 0
        known = before.where(slots.valid, 0).amax(-1).to(mean.dtype)
        old = known - 2
        moved = self.beta * mean + (1 - self.beta) * old
        gate = torch.where(known > 0, torch.where(many > 0, moved, old), mean)
        return gate, (known > 0) | (many > 0)


@dataclass(frozen=True)
class Density(Revised):
    """Keep what another score says, and note how unevenly a prompt attends to its tokens.

    It is noted with every prompt and left alone while tokens are generated, so that layers keep
    their shares.

    Reference: D2O, arXiv 2406.13035.

    Args:
        score: Another score, whose first statistic are column sums of the attention.
        mode: `"paper"` takes the variance of the column sums, averaged over heads, over the squared
            mean: the same number for prompts of any length. `"official"` takes the variance in each
            key-value head, brought to 0..1 between the heads of a layer, and the mean of those.
    """

    score: Score
    mode: Mode = "paper"

    def check(self) -> None:
        """Raise ValueError if the score keeps no statistics."""
        if not self.score.statistics:
            raise ValueError(f"score={self.score!r}: must keep column sums of attention, as Mass()")

    @property
    def statistics(self) -> tuple[str, ...]:
        """Column sums, and the variance, the same for all slots of a layer."""
        return (*self.score.statistics, _DENSITY)

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Take note of column sums and their variance."""
        self.score.note(stats, attended)
        if attended.query.count == 1:
            return
        there = attended.slots.valid.expand(attended.slots.k.shape[:3])
        mass = stats[self.score.statistics[0]] * there
        if self.mode == "official":
            stats[_DENSITY][:] = _between_heads(mass, there)[:, None, None]
            return
        mass, many = mass.mean(1), there.any(1).sum(-1).clamp_min(1)
        mean = mass.sum(-1) / many
        spread = ((mass - mean[:, None]).square() * there.any(1)).sum(-1) / many
        stats[_DENSITY][:] = (spread / mean.square().clamp_min(1e-20))[:, None, None]


def _between_heads(mass: Tensor, there: Tensor) -> Tensor:
    """Return the mean over heads of their variances [B], the least being 0 and the largest 1."""
    many = there.sum(-1, keepdim=True)
    away = (mass - mass.sum(-1, keepdim=True) / many.clamp_min(1)) * there
    spread = away.square().sum(-1) / (many[..., 0] - 1).clamp_min(1)
    low, high = spread.amin(1, keepdim=True), spread.amax(1, keepdim=True)
    return ((spread - low) / (high - low + 1e-6)).mean(1)


@dataclass(frozen=True)
class DenseLayers(Budget):
    """Give layers whose attention is spread evenly more slots than those where it is not.

    The shares are a softmax of minus the variances.

    Reference: D2O, arXiv 2406.13035.

    Args:
        size: Slots of a row, averaged over layers, or a share of the tokens.
        least: Share of `size` that every layer holds, 0 to 1; in paper mode.
        mode: `"paper"` divides variances by their mean over the layers first, as the softmax would
            otherwise depend on how long the prompt is; all layers together hold as many slots as
            with the same size for each, and what a layer has no use for goes to the others.
            `"official"` takes variances as they are, gives every layer a hundredth of the tokens at
            least, gives nobody what a layer has no use for, and then leaves layers 0, 1 and the
            last whole, so that more is held than `size` says.
    """

    size: Size
    least: Share = 0.25
    mode: Mode = "paper"

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the slots of every layer, or raise ValueError if the score is not wrapped in `Density`."""
        if any(_DENSITY not in each.stats for each in seen):
            raise ValueError("DenseLayers needs the variance that `Density(score)` notes; wrap the score in it")
        spread = torch.stack([each.stats[_DENSITY].amax(-1) for each in seen]).double()
        room = torch.stack([each.lengths for each in seen])
        each = slots_for(self.size, seen[0].tokens)
        if self.mode == "official":
            tokens = seen[0].tokens
            slots = (-spread).softmax(0) * len(seen) * each
            slots = slots.maximum(tokens * 0.01).floor().long().clamp_min(1).minimum(room)
            ends = [one.layer in (0, 1, one.layers - 1) for one in seen]
            whole = torch.tensor(ends, device=room.device)[:, None, None]
            return list(room.where(whole, slots))
        share = (-spread / spread.mean(0).clamp_min(1e-20)).softmax(0)
        floor = (each * self.least).long().clamp_min(1).expand_as(room)
        return list(apportion(share, each * len(seen), floor.minimum(room), room))

"""Slots that differ between the heads of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, slots_for
from diffcache.kv.observe import Observation
from diffcache.kv.settings import Share, Size, Whole

Heads = tuple[tuple[bool, ...], ...]
Safeguard = Literal["blend", "floor"]


@dataclass(frozen=True)
class AdaHead(Budget):
    """Share a layer's slots out among its heads by their highest scores.

    The slots of all heads go to the highest scores of all of them together, of equals to those that
    rank higher within their head, and a safeguard sees to heads of low scores. Works with any score
    that means the same in all heads of a layer, as attention does.

    Args:
        base: Slots of every head before they are shared out.
        floor: Weight of the safeguard, from 0 to 1; 1 shares nothing out.
        safeguard: `"floor"` gives every head that share of its slots first and shares out the
            rest, so that the sum over the heads is kept. `"blend"` shares out all, and takes the
            mean, weighted by `floor`, of what a head won and what it had. It is rounded in each
            head, so that the sum may be off by a slot a head, and leaves out slots of an infinite
            score, which stay.

    Reference: Ada-KV, arXiv 2407.11550, algorithm 1; the official code blends, kvpress has floors.
    """

    base: Budget
    floor: Share = 0.2
    safeguard: Safeguard = "floor"
    size: Size = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", self.base.size)

    @property
    def looks_across(self) -> bool:
        """Return whether the base looks across layers."""
        return self.base.looks_across

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return slots that sum over the heads of a layer to about what the base gives."""
        budgets = self.base.allot(scores, seen)
        share = self._blended if self.safeguard == "blend" else self._floored
        return [
            share(score, budget.minimum(each.lengths), each.lengths)
            for score, budget, each in zip(scores, budgets, seen, strict=True)
        ]

    def _floored(self, score: Tensor, budget: Tensor, lengths: Tensor) -> Tensor:
        safe = (budget * self.floor + 1e-9).floor().long().clamp_min(1).minimum(budget)
        return self._shared(score, budget, lengths, safe)

    def _blended(self, score: Tensor, budget: Tensor, lengths: Tensor) -> Tensor:
        stay = (score == float("inf")).sum(-1).minimum(budget)
        won = self._shared(score, budget, lengths, stay) - stay
        safe = ((budget - stay).double() * self.floor + 1e-9).floor()
        mixed = (won * (1 - self.floor) + safe).round().long() + stay
        return mixed.clamp_min(1).minimum(lengths).where(budget < lengths, lengths)

    def _shared(self, score: Tensor, budget: Tensor, lengths: Tensor, safe: Tensor) -> Tensor:
        """Return slots [B, H] of which each head has `safe`, and wins the others by its scores."""
        ranked = score.sort(dim=-1, descending=True).values
        place = torch.arange(score.shape[-1], device=score.device)
        open_to_all = (place >= safe[..., None]) & (place < lengths[..., None])
        ranked = ranked.masked_fill(~open_to_all, float("-inf"))
        # Ranks before heads, so that a stable sort gives equal scores to all heads in turn.
        flat = ranked.transpose(1, 2).flatten(1)
        order = torch.argsort(flat, dim=-1, descending=True, stable=True)
        left = (budget - safe).sum(-1, keepdim=True)
        taken = torch.arange(flat.shape[1], device=score.device) < left
        head = order % score.shape[1]
        return safe.scatter_add(1, head, taken.long()).minimum(lengths)


@dataclass(frozen=True)
class HeadTable(Budget):
    """Some heads hold everything, the others a fixed number of slots.

    Reference: DuoAttention, arXiv 2410.10819; RazorAttention, arXiv 2407.15891: each finds the
    heads in its own way.

    Args:
        whole: True for heads that hold everything, by layer and key-value head.
        size: Slots of another head, or a share of the tokens it has seen.
        least: Slots of another head at least.
        more: Slots of another head on top of that, as for its first tokens.
    """

    bounded = False  # retrieval heads hold every token
    looks_across = False
    whole: Heads
    size: Size
    least: Whole = 0
    more: Whole = 0

    def check(self) -> None:
        """Raise ValueError if the table does not fit the model."""
        if not self.whole or len({len(row) for row in self.whole}) != 1:
            raise ValueError(f"whole={self.whole!r}: must be a table of layers, each with as many heads")

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return what the table says."""
        return [self._of(each) for each in seen]

    def _of(self, seen: Observation) -> Tensor:
        heads = seen.slots.k.shape[1]
        if len(self.whole) != seen.layers or len(self.whole[0]) != heads:
            raise ValueError(
                f"the table of heads is of {len(self.whole)} layers with {len(self.whole[0])} "
                f"heads, and this model has {seen.layers} with {heads}: use its own table"
            )
        whole = torch.tensor(self.whole[seen.layer], device=seen.lengths.device)
        few = slots_for(self.size, seen.tokens).clamp_min(self.least) + self.more
        return seen.lengths.where(whole, few.minimum(seen.lengths))

"""Budgets of a prompt that stay as they are while tokens are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from diffcache.kv.budget import Budget, Size
from diffcache.kv.observe import Observation


@dataclass(frozen=True)
class Steady(Budget):
    """Give a prompt what another budget says; from then on one slot goes each time.

    Done at every token, that holds each layer at the size it had after the prompt.

    Reference: PrefixKV, arXiv 2412.03409, official code.

    Args:
        base: The budget of a prompt.
    """

    base: Budget
    size: Size = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.base.size)

    @property
    def looks_across(self) -> bool:
        """Whether the base looks across layers."""
        return self.base.looks_across

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return one slot less than is held in rows that lost some, else what the base says."""
        return [
            (each.lengths - 1).clamp_min(1).where(each.lengths < each.tokens, budget)
            for each, budget in zip(seen, self.base.allot(scores, seen), strict=True)
        ]

"""Budgets: how many slots each layer and head may hold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.settings import Count, Settings, Size

# A share of 0.1 of 30 tokens is 3, not the 2 that 0.1 * 30 - 1e-16 would give.
_ROUNDING = 1e-9


def slots_for(size: Size, tokens: Tensor) -> Tensor:
    """Return the slots that a size allows rows of `tokens` tokens each, int64 like `tokens`.

    A share is rounded down, as kvpress rounds it, and is never less than one slot.
    """
    if isinstance(size, float):
        allowed = (tokens.double() * size + _ROUNDING).floor().long()
        return allowed.clamp_min(1)
    return torch.full_like(tokens, size)


def count_for(size: Size, tokens: int) -> int:
    """Return the slots that a size allows a row of `tokens` tokens, as `slots_for` does."""
    return max(math.floor(tokens * size + _ROUNDING), 1) if isinstance(size, float) else size


class Budget(Settings, ABC):
    """Slots that each row may hold; a frozen dataclass of settings.

    A budget never looks at single tokens, only at scores as a whole.
    """

    size: Size

    @property
    def looks_across(self) -> bool:
        """Return whether slots of a layer depend on others, or on its place among them."""
        return True

    @property
    def bounded(self) -> bool:
        """Return whether rows hold no more however many tokens come, as no share of them does."""
        return isinstance(self.size, int)

    def steady(self, tokens: int, held: int) -> int | None:
        """Return the slots of rows that saw `tokens` and hold `held` if they do not depend on scores; else None."""
        return None

    @abstractmethod
    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the slots of every layer, int64 [B, H], at most as many as are held.

        Args:
            scores: Scores of each layer, [B, H, S]; -inf in empty slots.
            seen: Slots of each layer, with what was observed of them.
        """


@dataclass(frozen=True)
class Uniform(Budget):
    """The same number of slots for every layer and head.

    Args:
        size: Slots of a row, or a share of the tokens it has seen.
    """

    looks_across = False
    size: Size

    def steady(self, tokens: int, held: int) -> int:
        """Return the size."""
        size = self.size
        allowed = max(int(tokens * size + _ROUNDING), 1) if isinstance(size, float) else size
        return min(allowed, held)

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the size everywhere."""
        return [slots_for(self.size, each.tokens).minimum(each.lengths) for each in seen]


@dataclass(frozen=True)
class WhenFull(Uniform):
    """The same number of slots for every layer and head, in rows that hold more than `full`; others stay.

    Args:
        size: Slots of a row that is cut.
        full: Slots up to which a row stays as it is, whatever rows beside it hold.
    """

    full: Count

    def steady(self, tokens: int, held: int) -> int:
        """Return the size, or what is held."""
        return super().steady(tokens, held) if held > self.full else held

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the size of full rows, and what others hold."""
        cut = super().allot(scores, seen)
        return [few.where(each.lengths > self.full, each.lengths) for few, each in zip(cut, seen, strict=True)]


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
        """Return whether the base looks across layers."""
        return self.base.looks_across

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return one slot less than is held in rows that lost some, else what the base says."""
        return [
            (each.lengths - 1).clamp_min(1).where(each.lengths < each.tokens, budget)
            for each, budget in zip(seen, self.base.allot(scores, seen), strict=True)
        ]

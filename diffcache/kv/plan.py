"""Plans: what happens to every slot, given scores and a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation

KEEP, DROP = 0, -1


class Planner(ABC):
    """Plan for every slot; a frozen dataclass of settings."""

    @property
    def wants_out(self) -> bool:
        """Whether it reads the weight of the output projection."""
        return False

    def ends(self, budget: int) -> tuple[int, int] | None:
        """Return how many first and last tokens stay, where scores alone decide on all others.

        None stands for any other plan.

        Args:
            budget: Slots of a row.
        """
        return None

    @abstractmethod
    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what becomes of every slot.

        Args:
            score: [B, H, S], -inf in empty slots.
            budget: Slots a row may hold, int64 [B, H].
            seen: The layer.

        Returns:
            int8 [B, H, S]: -1 it is dropped, 0 it is kept as it is, n > 0 it goes to the n-th
            codec of the recipe's ladder.
        """


def ranks(score: Tensor) -> Tensor:
    """Return the rank of every slot, 0 for the highest score; of equals the later slot first.

    Args:
        score: [B, H, S].

    Returns:
        int64 [B, H, S].
    """
    order = torch.argsort(score.flip(-1), dim=-1, descending=True, stable=True)
    places = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places).flip(-1)


def check_ends(sinks: int, recent: int) -> None:
    """Raise unless these are numbers of first and last tokens that always stay.

    Raises:
        ValueError: If one is negative.
    """
    for name, count in (("sinks", sinks), ("recent", recent)):
        if count < 0:
            raise ValueError(f"{name}={count}: must be at least 0 tokens")


def protected(score: Tensor, seen: Observation, sinks: int, recent: int) -> Tensor:
    """Return scores in which the first and the last tokens come before all others.

    Where the budget holds less than all of them, the latest are kept first.

    Args:
        score: [B, H, S].
        seen: The layer.
        sinks: First tokens of a row.
        recent: Last tokens of a row.
    """
    width = score.shape[-1]
    place = torch.arange(width, device=score.device)
    first = place - seen.pad[..., None]
    is_first = (first >= 0) & (seen.slots.pos >= 0) & (first < sinks)
    is_last = place >= width - recent
    score = score.masked_fill(is_first, float("inf"))
    return score.masked_fill(is_last & seen.valid, float("inf"))


@dataclass(frozen=True)
class TopK(Planner):
    """Keep the slots of the highest scores, and always the first and last tokens.

    Args:
        sinks: First tokens that are always kept.
        recent: Last tokens that are always kept.

    Raises:
        ValueError: If a number is negative.
    """

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        check_ends(self.sinks, self.recent)

    def ends(self, budget: int) -> tuple[int, int]:
        """Return the numbers it was made with."""
        return self.sinks, self.recent

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        rank = ranks(protected(score, seen, self.sinks, self.recent))
        keep = (rank < budget[..., None]) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)

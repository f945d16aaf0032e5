"""Budgets by layer and by how far a generation has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, Size, check_size, slots_for
from diffcache.kv.observe import Observation


@dataclass(frozen=True)
class Scheduled(Budget):
    """Give every layer a budget of its own at every scale of a next-scale image model.

    The scale is known from the tokens that a row has seen.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3; `diffcache.kv.learn.scalekv.capacities`
    finds the table.

    Args:
        size: Slots where the table is empty, or a share of the tokens.
        scales: Tokens of each scale, first to last.
        table: Slots of each layer after each scale; empty is `size` everywhere.
        prompt: Tokens that come before the first scale.

    Raises:
        ValueError: If the numbers do not fit each other.
    """

    size: Size
    scales: tuple[int, ...]
    table: tuple[tuple[int, ...], ...] = ()
    prompt: int = 0

    def __post_init__(self) -> None:
        check_size("size", self.size)
        if not self.scales or min(self.scales) < 1 or self.prompt < 0:
            raise ValueError(
                f"scales={self.scales}, prompt={self.prompt}: must be at least 1 token each, and 0"
            )
        for layer, row in enumerate(self.table):
            if len(row) != len(self.scales) or min(row) < 1:
                raise ValueError(
                    f"table[{layer}]={row}: must be {len(self.scales)} numbers of slots, one for "
                    "each scale, at least 1"
                )

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the budgets of the scale that was written last.

        Raises:
            ValueError: If there are more or fewer layers than rows in the table.
        """
        if self.table and len(self.table) != len(seen):
            raise ValueError(
                f"table of {len(self.table)} layers, and the recipe is used on {len(seen)}; find "
                "it for this model with diffcache.kv.learn.scalekv.capacities"
            )
        found = []
        for index, each in enumerate(seen):
            slots = slots_for(self.size, each.tokens)
            if self.table:
                row = torch.tensor(self.table[index], device=slots.device)
                slots = row[self.scale(each.tokens)]
            found.append(slots.minimum(each.lengths))
        return found

    def scale(self, tokens: Tensor) -> Tensor:
        """Return the scale to which the last of so many tokens belongs, int64 like `tokens`."""
        ends = list(accumulate(self.scales, initial=self.prompt))[1:]
        edges = torch.tensor(ends, device=tokens.device)
        return torch.searchsorted(edges, tokens.contiguous()).clamp_max(len(ends) - 1)

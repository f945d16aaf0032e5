"""More slots for the first layers than for the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, Size, check_size, slots_for
from diffcache.kv.budgets.apportion import apportion
from diffcache.kv.observe import Observation


@dataclass(frozen=True)
class Pyramid(Budget):
    """Slots that fall evenly from the first layer to the last.

    Besides its window, the last layer gets `1 / beta` of the mean and the first what is left of
    twice the mean. Where a prompt is too short for that, the first layer keeps all and the last
    layer gets more, so that the total stays.

    Args:
        size: Mean slots of a row, or a share of the tokens it has seen.
        beta: Steepness of the pyramid, at least 1; 1 gives all layers the same.
        window: Slots that every layer gets beforehand.
        mode: `"paper"` keeps an exact total. `"official"` rounds the least budget and the step from
            layer to layer down, so that more is held, and gives all layers the same where a prompt
            has fewer tokens than twice their mean beyond the window.

    Raises:
        ValueError: If a setting is out of its range.

    Reference: PyramidKV, arXiv 2406.02069, section 4.2.1.
    """

    size: Size
    beta: float = 20.0
    window: int = 8
    mode: Literal["paper", "official"] = "paper"

    def __post_init__(self) -> None:
        check_size("size", self.size)
        if not self.beta >= 1:
            raise ValueError(f"beta={self.beta}: must be at least 1")
        if self.window < 0:
            raise ValueError(f"window={self.window}: must be at least 0 slots")

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return an arithmetic sequence, rounded."""
        if self.mode == "official":
            return [self._stepped(each, index, len(seen)) for index, each in enumerate(seen)]
        held = torch.stack([each.lengths for each in seen])
        mean = torch.stack([slots_for(self.size, each.tokens) for each in seen]).minimum(held)
        spare = (mean - self.window).clamp_min(0).double().mean(0)
        room = (held[0] - self.window).clamp_min(0).double()
        first = (spare * (2 - 1 / self.beta)).minimum(room)
        step = torch.linspace(0, 1, len(seen), dtype=torch.float64, device=held.device)
        shape = first - (2 * first - 2 * spare) * step.view(-1, 1, 1) if len(seen) > 1 else spare
        weights = (shape + self.window).expand(held.shape)
        least = held.clamp_max(self.window).minimum(mean)
        return list(apportion(weights, mean.sum(0), least, held))

    def _stepped(self, seen: Observation, index: int, layers: int) -> Tensor:
        """Return the slots of one layer as the official code has them."""
        mean = slots_for(self.size, seen.tokens)
        spare = (mean - self.window).clamp_min(0)
        room = (seen.lengths - self.window).clamp_min(0)
        most = (2 * spare - (spare / self.beta).floor().long()).minimum(room)
        step = (2 * (most - spare)) // max(layers - 1, 1)
        slots = (most - index * step + self.window).where(seen.lengths >= 2 * spare, mean)
        return slots.clamp_min(1).minimum(seen.lengths)

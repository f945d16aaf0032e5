"""Layer budgets in proportions that were found beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, Size, check_size, slots_for
from diffcache.kv.budgets.apportion import apportion
from diffcache.kv.observe import Observation


@dataclass(frozen=True)
class LayerTable(Budget):
    """Share out the slots of all layers in given proportions.

    All heads of a layer get the same. Slots that a layer cannot use, as it holds less, go to the
    others, so that the total is that of `Uniform(size)`.

    Reference: PrefixKV, arXiv 2412.03409; CompressKV, arXiv 2508.02401; EpiCache, arXiv
    2509.17396: each finds the weights in its own way. Departure: a layer may get all that it can
    use, where CompressKV gives none more than three times the average.

    Args:
        size: Slots of a row in the average layer, or a share of the tokens it has seen.
        weights: Weight of each layer, in any unit; empty has all layers get the same.
        least: Slots that every layer gets, at most `size`.

    Raises:
        ValueError: If a number is out of range.
    """

    size: Size
    weights: tuple[float, ...] = ()
    least: int = 1

    def __post_init__(self) -> None:
        check_size("size", self.size)
        if self.least < 0:
            raise ValueError(f"least={self.least}: must be at least 0 slots")
        if self.weights and (min(self.weights) < 0 or not 0 < sum(self.weights) < float("inf")):
            raise ValueError(
                f"weights={self.weights}: must be numbers, none negative and not all 0"
            )

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the shares.

        Raises:
            ValueError: If there are more or fewer layers than weights.
        """
        weights = self.weights or (1.0,) * len(seen)
        if len(weights) != len(seen):
            raise ValueError(
                f"weights of {len(weights)} layers, and the recipe is used on {len(seen)}; find "
                "them for this model, without the layers that `skip` leaves out"
            )
        caps = torch.stack([each.lengths for each in seen])
        base = torch.stack([slots_for(self.size, each.tokens) for each in seen])
        given = torch.tensor(weights, dtype=torch.float64, device=caps.device).view(-1, 1, 1)
        least = base.clamp_max(self.least).minimum(caps)
        return list(apportion(given.expand(caps.shape), base.sum(0), least, caps))

"""Budgets that fall from one group of layers to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diffcache.kv.budget import Budget, Size, check_size, slots_for
from diffcache.kv.observe import Observation


@dataclass(frozen=True)
class Arithmetic(Budget):
    """Give groups of layers budgets that fall by equal steps, alike within a group.

    The last group gets the average divided by `beta`, the first twice the average less that, so
    that the average is `size` where the groups are equally large.

    Reference: WindowKV, arXiv 2503.17922, section 2.2.3 (groups of layers; the arithmetic sequence
    is that of PyramidKV, arXiv 2406.02069). Budgets are rounded down.

    Args:
        size: Slots of a row in the average layer, or a share of the tokens it has seen.
        group: Layers of a group; what is left over is a smaller last group.
        beta: Ratio of the average budget to the smallest one, at least 1.

    Raises:
        ValueError: If a number is out of range.
    """

    size: Size
    group: int = 4
    beta: float = 2.0

    def __post_init__(self) -> None:
        check_size("size", self.size)
        if self.group < 1 or self.beta < 1:
            raise ValueError(f"group={self.group}, beta={self.beta}: must be at least 1")

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the sequence; a budget above what is held leaves the rest of it unused."""
        groups = -(-len(seen) // self.group)
        found = []
        for index, each in enumerate(seen):
            place = (index // self.group) / (groups - 1) if groups > 1 else 0.5
            base = slots_for(self.size, each.tokens)
            if bool((base >= each.lengths).all()):
                found.append(each.lengths)
                continue
            least = 1 / self.beta
            factor = (2 - least) * (1 - place) + least * place
            slots = (base.double() * factor + 1e-9).floor().long()
            found.append(slots.clamp_min(1).minimum(each.lengths))
        return found

"""Plans that drop the slot at a fixed distance from the end while tokens are generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner, protected, ranks


@dataclass(frozen=True)
class FixedSlot(Planner):
    """Keep the best slots of a prompt; from then on drop those at a fixed distance from the end.

    Reference: PrefixKV, arXiv 2412.03409, official code: once slots were dropped, a new token
    pushes out the slot that is `distance` slots before the end, whatever it is worth.

    Args:
        distance: Distance of the slot that goes from the end, in slots: 1 is the newest.
        sinks: First tokens of a prompt that are always kept.
        recent: Last tokens of a prompt that are always kept.

    Raises:
        ValueError: If a number is out of range.
    """

    distance: int = 25
    sinks: int = 4
    recent: int = 1

    def __post_init__(self) -> None:
        if self.distance < 1 or self.sinks < 0 or self.recent < 0:
            raise ValueError(
                f"distance={self.distance}, sinks={self.sinks}, recent={self.recent}: must be at "
                "least 1, 0 and 0"
            )

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        best = ranks(protected(score, seen, self.sinks, self.recent)) < budget[..., None]
        place = torch.arange(score.shape[-1], device=score.device)
        distance = torch.full_like(budget, self.distance).minimum(seen.lengths)
        stop = (score.shape[-1] - distance + 1)[..., None]
        stop = stop.maximum(seen.pad[..., None] + (seen.lengths - budget)[..., None])
        gone = (place < stop) & (place >= stop - (seen.lengths - budget)[..., None])
        settled = (seen.lengths < seen.tokens)[..., None]
        keep = best.where(~settled, ~gone) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)

"""Plans that send slots to codecs of fewer bits instead of dropping them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import KEEP, Planner, ranks


@dataclass(frozen=True)
class Demote(Planner):
    """Hold the best slots at one level of the ladder and the others at another.

    Slots that a codec of the ladder holds already stay there: coded again they would only lose.

    Args:
        top: Level of the best slots; 0 leaves them exact.
        rest: Level of the others.
        recent: Share of the budget that the latest tokens take, whatever their score.
        fresh: The budget is meant as the share of those slots that no codec holds yet, rather than
            as the number of slots that may stay at the level `top`.

    Raises:
        ValueError: If a setting is out of its range.

    References: MiKV, arXiv 2402.18096 (`top=0`, half the budget recent, as in H2O);
    ZipCache, arXiv 2405.14256 (`top=1, rest=2, fresh=True`).
    """

    top: int = 0
    rest: int = 1
    recent: float = 0.0
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.top < 0 or self.rest < 1 or self.top == self.rest:
            raise ValueError(
                f"top={self.top}, rest={self.rest}: must be two levels, at least 0 and at least 1"
            )
        if not 0 <= self.recent <= 1:
            raise ValueError(f"recent={self.recent}: must be a share of the budget, 0 to 1")

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return the levels."""
        free = seen.valid.expand(score.shape)
        if seen.levels is not None:
            free = free & (seen.levels == 0)
        if self.fresh:
            share = budget / seen.lengths.clamp_min(1)
            budget = (free.sum(-1) * share + 1e-4).floor().long()
        recent = (budget * self.recent + 1e-9).floor().long()[..., None]
        is_last = torch.arange(score.shape[-1], device=score.device) >= score.shape[-1] - recent
        # Slots without any attention may have -inf like those that are no longer free: these last.
        score = score.clamp_min(torch.finfo(score.dtype).min).masked_fill(is_last, float("inf"))
        rank = ranks(score.masked_fill(~free, float("-inf")))
        plan = torch.where(rank < budget[..., None], self.top, self.rest)
        return torch.where(free, plan, KEEP).to(torch.int8)

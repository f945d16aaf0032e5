"""Keep in two stages: by score, then by score and value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner, ranks
from diffcache.kv.score.value import projected_norm


@dataclass(frozen=True)
class TwoStage(Planner):
    """Keep a share of the budget by score, and the rest by score times what a value contributes.

    The contribution is the 1-norm of the value behind the output projection, the mean over the
    query heads of a key-value head.

    Args:
        first: Share of the budget that goes by the score alone, from 0 to 1.
        epsilon: Number added to the score before it is multiplied; dimensionless.

    Raises:
        ValueError: If a setting is out of its range.

    Reference: CriticalKV, Identify Critical KV Cache in LLM Inference from an Output Perturbation
    Perspective, arXiv 2502.03805, algorithm 1.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise ValueError(f"first={self.first}: must be a share from 0 to 1")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon}: must be at least 0")

    @property
    def wants_out(self) -> bool:
        """Whether it reads the weight of the output projection."""
        return True

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        first = (budget * self.first + 1e-9).floor().long()
        if self.first > 0:
            first = first.clamp_min(1)
        chosen = ranks(score) < first[..., None]
        product = (score + self.epsilon) * projected_norm(seen)
        # Infinite scores stay what they are: slots that must be kept, and empty ones.
        product = product.where(score.isfinite(), score).masked_fill(chosen, float("inf"))
        keep = (ranks(product) < budget[..., None]) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)

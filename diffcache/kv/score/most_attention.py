"""The most attention that any query paid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score

PROBE = "probe"


@dataclass(frozen=True)
class MaxAttention(Score):
    """Keep the largest attention that any query gave a slot, over the query heads of a head.

    Run on a repeated prompt it says how much is needed to repeat it.

    Reference: KVzip, arXiv 2505.23416; EpiCache, arXiv 2509.17396.
    """

    statistics = (PROBE,)

    def __call__(self, seen: Observation) -> Tensor:
        """Return the largest attention, [B, H, S]."""
        return seen.stats[PROBE]

    def track(self, stats: dict[str, Tensor], asked: Query, found: Tensor, probs: Tensor) -> None:
        """Take the larger of what was and what a block of queries gives."""
        stats[PROBE].copy_(torch.maximum(stats[PROBE], probs.amax((2, 3)).float()))


@dataclass(frozen=True)
class Asked(Score):
    """The score that a probe left behind; ordinary queries are not looked at.

    See `diffcache.kv.life.on_request.compress_by_probe`.

    Reference: KVzip, arXiv 2505.23416; EpiCache, arXiv 2509.17396.
    """

    def __call__(self, seen: Observation) -> Tensor:
        """Return the largest attention of the probe, [B, H, S], or raise ValueError if nothing was asked."""
        if PROBE not in seen.stats:
            raise ValueError(
                "this recipe scores slots by a probe, and none was asked: compress with "
                "diffcache.kv.life.on_request.compress_by_probe"
            )
        return seen.stats[PROBE]

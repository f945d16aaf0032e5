"""Reuse the stack's residual while the first block's residual stands still (FBCache)."""

from __future__ import annotations

from dataclasses import dataclass

from diffcache.features.base import Change, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Gate


@dataclass(frozen=True)
class FirstBlock(FeatureMethod):
    """Skip all but the first block while that block's residual hardly changed.

    The first block always runs. While the relative L1 change of its residual since the last
    computed step, `mean|new - old| / mean|old|`, stays below `threshold`, the residuals of the
    other blocks are reused. Reference: First Block Cache of ParaAttention,
    https://github.com/chengzeyi/ParaAttention. Differs: the first guidance branch decides for
    all, unless `by_branch` is set, the comparison is in float32, and each list of blocks keeps its
    own residual, so that what a model adds between the lists stays exact.

    Args:
        threshold: Largest change still taken as none; 0 turns the cache off. Dimensionless; 0.05
            to 0.2 is usual.
        warmup: First steps that are always computed, at least 1.
        by_branch: Whether every guidance branch decides for itself, as in diffusers.
    """

    threshold: Change = 0.1
    warmup: Warmup = 1
    by_branch: bool = False

    def parts(self) -> Combine:
        """Return a gate on the first block's residual, and reuse behind it."""
        when = Gate(self.threshold, self.warmup, by_branch=self.by_branch)
        return Combine(when, Reuse(), lead=1)

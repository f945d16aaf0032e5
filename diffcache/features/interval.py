"""Compute one step in n and reuse it (FORA)."""

from __future__ import annotations

from dataclasses import dataclass

from diffcache.features.base import Spacing, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every
from diffcache.step import Site


@dataclass(frozen=True)
class Interval(FeatureMethod):
    """Reuse features for `every - 1` steps after each computed one.

    Reference: FORA, arXiv 2407.01425, section 3 (its site is `module`; `stack` here by default,
    which holds one tensor a stream instead of several a block). On a UNet `site="deep"` is
    DeepCache, arXiv 2312.00858, with its uniform schedule and branch 0.

    Args:
        every: Interval in steps; 1 turns the cache off.
        warmup: First steps that are always computed, at least 1.
        site: Site of the features, a `Site` or its name.
    """

    every: Spacing = 3
    warmup: Warmup = 1
    site: Site | str = Site.STACK

    def parts(self) -> Combine:
        """Return one step in `every`, reused."""
        return Combine(Every(self.every, self.warmup), Reuse(), self.site)

"""Compute one step in n and reuse it (FORA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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

    Raises:
        ValueError: If `every` or `warmup` is below 1 or the site is unknown or `run`.

    Example:
        >>> pipe = diffcache.wrap(pipe, Interval(every=3))  # doctest: +SKIP
    """

    name: ClassVar[str] = "interval"

    every: int = 3
    warmup: int = 1
    site: Site | str = Site.STACK

    def parts(self) -> Combine:
        """Return one step in `every`, reused."""
        return Combine(Every(self.every, self.warmup), Reuse(), self.site)

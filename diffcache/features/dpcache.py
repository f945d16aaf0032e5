"""Compute the key steps of least extrapolation error, found by dynamic programming (DPCache)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from torch import Tensor

from diffcache.features.base import check_bool, check_int
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.fitted import check_site, feature_at
from diffcache.features.parts.instead import Newton
from diffcache.features.parts.when import Listed
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.step import Site


def key_steps(
    errors: Tensor, count: int, first: int = 3, longest: int | None = None, last: bool = False
) -> tuple[tuple[int, ...], float]:
    """Return the computed steps of least total error, and that error.

    A skipped step is extrapolated from the last two computed ones, so the error between two of them
    depends on the one before as well; the programme runs over pairs and is exact. Of equals, the
    smallest steps win.

    Args:
        errors: `[T, T, T]`: error at step t of a line through steps i < j < t, at `[i, j, t]`.
        count: Number of computed steps.
        first: First steps that are always computed, at least 2.
        longest: Most steps from a computed one to the next or to the end, None for any number.
        last: Whether the last step is computed.

    Raises:
        ValueError: If no schedule is like that.
    """
    total = len(errors)
    table = np.asarray(errors.double())
    i, j, k = np.ogrid[:total, :total, : total + 1]
    after = np.where(j < k[:, :, :total], table, 0.0)
    costs = np.concatenate((np.zeros((total, total, 1)), after.cumsum(2)), axis=2)
    far = total if longest is None else longest
    costs = np.where((i < j) & (j < k) & (j - i <= far) & (k - j <= far), costs, np.inf)
    best = np.full((total, total), np.inf)  # of the two latest computed steps
    if 2 <= first <= min(count, total):
        best[first - 2, first - 1] = 0.0
    choices = []
    for _ in range(first, count):
        sums = best[:, :, None] + costs[:, :, :total]
        choices.append(sums.argmin(0))
        best = sums.min(0)
    ends = best + costs[:, :, total]
    if last:
        ends[:, :-1] = np.inf
    if not np.isfinite(ends.min()):
        raise ValueError(
            f"computed={count}: no schedule of {total} steps computes so many, with the first "
            f"{first}, at most {far} steps apart" + (" and the last" if last else "")
        )
    before, now = map(int, np.unravel_index(ends.argmin(), ends.shape))
    error, steps = float(ends[before, now]), [now, before]
    for choice in reversed(choices):
        before, now = int(choice[before, now]), before
        steps.append(before)
    return tuple(sorted({*range(first), *steps})), error


@dataclass(frozen=True)
class DPCache(Calibrated):
    """Extrapolate between `computed` key steps, which dynamic programming found beforehand.

    Calibration measures `mean|line(i, j, t) - feature(t)|` for all steps i < j < t of runs in which
    everything is computed; the key steps are those with the least sum over the skipped ones.
    Reference: DPCache, arXiv 2602.22654, with the first-order forecast and the exact programme over
    pairs of steps of SGLang. Differs: features are the residuals of each list of blocks (SGLang:
    the output of the last block), summed over prompts and guidance branches; calibrated together
    with `fitted-forecast`, it shares its pass.

    Args:
        computed: Number of computed steps.
        warmup: First steps that are always computed, at least 2.
        longest: Most steps from a computed one to the next or to the end, None for any number.
        last: Whether the last step is computed.
        site: Site of the features, a `Site` or its name.
        tables: Measured tables, or their file; all other settings can be had from the same.

    Raises:
        ValueError: If a value is out of its range, or no schedule is like that.
        TablesError: If the tables are not this method's, or were measured at another site.
    """

    name: ClassVar[str] = "dpcache"
    bibtex: ClassVar[str] = """@article{dpcache2026,
  title={DPCache: Denoising as Path Planning for Training-Free Diffusion Acceleration},
  journal={arXiv preprint arXiv:2602.22654},
  year={2026}
}"""

    collected_by: ClassVar[str] = "diffcache.offline.dpcache_collect:collector"
    schema: ClassVar[Schema] = Schema(
        {"errors": Entry(("steps", "steps", "steps"), low=0.0, high=1e30)}, header={"site": "text"}
    )

    computed: int = 8
    warmup: int = 3
    longest: int | None = None
    last: bool = False
    site: Site | str = Site.STACK
    tables: Tables | str | None = None

    def __post_init__(self) -> None:
        check_int("warmup", self.warmup, 2, " (a line takes two steps)")
        check_int("computed", self.computed, self.warmup, f" (warmup={self.warmup})")
        if self.longest is not None:
            check_int("longest", self.longest, 1, " (None for any number)")
        check_bool("last", self.last)
        object.__setattr__(self, "site", Site.of(self.site))
        self.load_tables()
        check_site(self.tables, self.site)

    def parts(self) -> Combine:
        """Return the key steps that the tables give, and a line through the last two."""
        tables = self.measured()
        steps = _solved(tables, self.computed, self.warmup, self.longest, self.last)
        kept = feature_at(self.site)
        return Combine(Listed(steps, tables.steps), Newton(1), self.site, feature=kept)


@lru_cache(maxsize=64)
def _solved(
    tables: Tables, computed: int, warmup: int, longest: int | None, last: bool
) -> tuple[int, ...]:
    """Return the key steps of tables."""
    return key_steps(tables["errors"], computed, warmup, longest, last)[0]

"""Compute the key steps of least extrapolation error, found by dynamic programming (DPCache)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from torch import Tensor

from diffcache.features.base import check_int
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.fitted import feature_at
from diffcache.features.parts.fit import best_steps
from diffcache.features.parts.instead import Newton
from diffcache.features.parts.when import Listed
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.ranges import Count, Range
from diffcache.step import Site


def key_steps(
    errors: Tensor, count: int, first: int = 3, longest: int | None = None, last: bool = False
) -> tuple[tuple[int, ...], float]:
    """Return the computed steps of least total error, and that error; of equals, the smallest.

    The error at step t of a line through steps i < j < t is at `[i, j, t]` of `errors`. The `first`
    steps, at least 2, are computed, the last if asked for, and none is more than `longest` after
    another. Raises ValueError if no schedule is like that.
    """
    total = len(errors)
    far = total if longest is None else longest

    def costs(keys: tuple[int, ...]) -> list[float]:
        now, before = keys
        skipped = errors[before, now].double().clone()  # the tables stay as they are
        skipped[: now + 1] = 0.0
        sums = [0.0, *skipped.cumsum(0).tolist()]
        sums[now + far + 1 :] = [math.inf] * (total - now - far)
        if last and now < total - 1:
            sums[total] = math.inf
        return sums

    error, steps = best_steps(costs, total, count, 2, first)
    if not steps:
        raise ValueError(
            f"computed={count}: no schedule of {total} steps computes so many, with the first "
            f"{first}, at most {far} steps apart" + (" and the last" if last else "")
        )
    return steps, error


@lru_cache(maxsize=64)
def _solved(tables: Tables, *given: Any) -> tuple[int, ...]:
    return key_steps(tables["errors"], *given)[0]


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
        ValueError: If no schedule is like that.
        TablesError: If the tables are not this method's, or were measured at another site.
    """

    collected_by: ClassVar[str] = "diffcache.offline.fitted_collect:Lines"
    schema: ClassVar[Schema] = Schema(
        {"errors": Entry(("steps", "steps", "steps"), low=0.0, high=1e30)}, header={"site": "text"}
    )

    computed: int = 8
    warmup: Annotated[int, Range(2), " (a line takes two steps)"] = 3
    longest: Count | None = None
    last: bool = False
    site: Site | str = Site.STACK
    tables: Tables | str | None = None

    def check(self) -> None:
        """Raise unless the warm-up is among the computed steps, and tables fit."""
        check_int("computed", self.computed, self.warmup, f" (warmup={self.warmup})")
        super().check()

    def parts(self) -> Combine:
        """Return the key steps that the tables give, and a line through the last two."""
        tables = self.measured()
        steps = _solved(tables, self.computed, self.warmup, self.longest, self.last)
        kept = feature_at(self.site)
        return Combine(Listed(steps, tables.steps), Newton(1), self.site, feature=kept)

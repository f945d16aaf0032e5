"""A schedule found by dynamic programming, with forecasts whose coefficients are fitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from diffcache.features.base import Instead
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.fit import Fit
from diffcache.features.parts.when import Listed
from diffcache.features.schema import Entry, Schema, shown
from diffcache.features.tables import Tables
from diffcache.ranges import Count, Positive, Range
from diffcache.step import Site, Step


@dataclass
class FittedHistory:
    """The last computed features and their steps, newest first."""

    features: list[Tensor] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Weighted(Instead):
    """Forecast a step as a weighted sum of the last computed features.

    Args:
        weights: (step, its computed steps newest first) -> one weight each, as pairs. Where a
            step or a history is not listed, the last feature stands in.
        history: Features that are kept.
    """

    state: ClassVar[type] = FittedHistory

    weights: tuple[tuple[int, tuple[int, ...], tuple[float, ...]], ...]
    history: Count

    def check(self) -> None:
        """Raise ValueError unless there is a finite weight for every kept feature."""
        for step, anchors, values in self.weights:
            fits = 0 < len(anchors) == len(values) <= self.history
            if not fits or not all(map(isfinite, values)):
                raise ValueError(
                    f"weights of step {step} after {shown(anchors)}: {shown(values)} must be a "
                    f"finite number for each of up to {self.history} computed steps"
                )
        table = {(step, anchors): values for step, anchors, values in self.weights}
        object.__setattr__(self, "_table", table)

    def record(self, state: FittedHistory, step: Step, feature: Tensor) -> None:
        """Keep the feature, forget the oldest."""
        state.features = [feature, *state.features][: self.history]
        state.anchors = [step.index, *state.anchors][: self.history]

    def estimate(self, state: FittedHistory, step: Step) -> Tensor:
        """Return the weighted sum; at the step that was just recorded, the feature itself."""
        table: dict[Any, tuple[float, ...]] = self._table  # type: ignore[attr-defined]
        weights = table.get((step.index, tuple(state.anchors)))
        if weights is None:
            return state.features[0]
        total = state.features[0] * weights[0]
        for weight, feature in zip(weights[1:], state.features[1:], strict=True):
            total = torch.add(total, feature, alpha=weight)
        return total


@dataclass(frozen=True)
class FittedForecast(Calibrated):
    """Compute `computed` steps, found by dynamic programming, and forecast with fitted weights.

    Calibration sums the inner products `G[s, t] = <F_s, F_t>` of the features of all steps, over
    prompts and guidance branches. A skipped step is forecast as the combination of the last
    `history` computed features that is nearest to it in the sense of least squares, which `G`
    alone determines; the weights sum to one, so that what does not change is forecast exactly.
    The schedule minimises the sum over the
    gaps between computed steps of `|sum_s w_s (forecast_s - F_s)|^2`, where `w_s` is how far the
    solver moves in step s: errors of one gap add up in the sample before it is seen again. The
    programme runs over the last `history` computed steps and is exact. Both are this project's
    own; the schedule by dynamic programming follows CacheQuant and BAC in spirit.

    Args:
        computed: Number of computed steps.
        history: Features a forecast is made of, 1 to 4; that many are held.
        ridge: Added to the diagonal of the normal equations, as a share of its mean; larger
            values keep weights small where runs under the cache leave the calibrated path.
        site: Site of the features, a `Site` or its name.
        tables: Measured tables, or their file; every `computed`, `history` and `ridge` can be had
            from the same.

    Raises:
        TablesError: If the tables are not this method's, or were measured at another site.
    """

    collected_by: ClassVar[str] = "diffcache.offline.fitted_collect:Products"
    schema: ClassVar[Schema] = Schema(
        {
            "products": Entry(("steps", "steps"), low=-1e30, high=1e30, inner=True),
            "moves": Entry(("steps",), low=-1e6, high=1e6),
        },
        header={"site": "text"},
    )

    computed: Count = 8
    history: Annotated[int, Range(1, 4)] = 2
    ridge: Positive = 1e-2
    site: Site | str = Site.STACK
    tables: Tables | str | None = None

    def parts(self) -> Combine:
        """Return the schedule and the weights that the tables give."""
        tables = self.measured()
        if self.computed > tables.steps:
            raise ValueError(f"computed={self.computed}: the tables are for {tables.steps} steps")
        steps, weights = _solved(tables, self.computed, self.history, float(self.ridge))
        return Combine(
            Listed(steps, tables.steps), Weighted(weights, self.history), self.site, feature=feature_at(self.site)
        )


def feature_at(site: Site | str) -> Any:
    """Return the feature of a site: an output of the model, a residual elsewhere."""
    return "output" if Site.of(site) is Site.MODEL else "residual"


@lru_cache(maxsize=64)
def _solved(tables: Tables, computed: int, history: int, ridge: float) -> tuple[Any, Any]:
    """Return the best schedule and its weights."""
    fit = Fit(tables["products"], tables["moves"], history, ridge)
    steps = fit.schedule(computed)
    return steps, fit.weights(steps)

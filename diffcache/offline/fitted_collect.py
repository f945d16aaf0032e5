"""Measure for FittedForecast the inner products of the features of all steps, for DPCache errors of lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.dpcache import DPCache
from diffcache.features.fitted import FittedForecast, feature_at
from diffcache.features.parts.when import Every
from diffcache.step import Site, Step


class Products(Collector):
    """Sums inner products of the features of all steps of a run."""

    def __init__(self, method: FittedForecast | DPCache) -> None:
        self._site = Site.of(method.site)
        self._sum: Tensor | None = None
        self._weights: Tensor | None = None
        self._run: dict[tuple[int, str, int], dict[int, Tensor]] = {}

    def site(self) -> Combine:
        """Return the method's site."""
        return Combine(Every(1), site=self._site, feature=feature_at(self._site))

    def begin(self, run: RunInfo) -> None:
        """Learn how far the solver moves in every step of a run, which must be as long as those before."""
        run.check_length(0 if self._sum is None else len(self._sum))
        self._run = {}
        self._weights = moves(run)
        if self._sum is None:
            self._sum = torch.zeros(run.total, run.total, dtype=torch.float64)

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> Tensor | None:
        """Keep a feature until the run ends."""
        if self._site is not Site.MODEL:
            self._keep(step, site, index, value)
        return None

    def output(self, step: Step, given: Tensor, value: Tensor) -> Tensor | None:
        """Keep an output until the run ends."""
        if self._site is Site.MODEL:
            self._keep(step, "output", 0, value)
        return None

    def _keep(self, step: Step, site: str, index: int, value: Tensor) -> None:
        self._run.setdefault((step.branch, site, index), {})[step.index] = value.detach().to("cpu", copy=True)

    def end(self) -> None:
        """Add the run's inner products."""
        assert self._sum is not None
        for features in self._run.values():
            steps = sorted(features)
            stacked = torch.stack([features[s].reshape(-1).double() for s in steps])
            self._sum[torch.tensor(steps)[:, None], torch.tensor(steps)] += stacked @ stacked.T
        self._run = {}

    def state(self) -> dict[str, Tensor]:
        """Return the sums."""
        return self.tables() if self._sum is not None else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums."""
        self._sum, self._weights = state["products"].clone(), state["moves"].clone()

    def tables(self) -> dict[str, Tensor]:
        """Return `products` float64 [T, T] and `moves` float64 [T]."""
        assert self._sum is not None
        assert self._weights is not None
        return {"products": self._sum, "moves": self._weights}

    def settings(self) -> dict[str, Any]:
        """Return the site."""
        return {"site": self._site.value}


def moves(run: RunInfo) -> Tensor:
    """Return how far a first-order solver moves the sample in each step, float64 [T].

    The differences of the noise levels; ones where the scheduler tells none.
    """
    sigmas = run.sigmas
    if sigmas is None or len(sigmas) != run.total + 1 or not torch.isfinite(sigmas).all():
        return torch.ones(run.total, dtype=torch.float64)
    return (sigmas[1:] - sigmas[:-1]).double()


class Lines(Products):
    """Sums the errors of lines; keeps features as `Products` does."""

    _errors: Tensor | None = None

    def begin(self, run: RunInfo) -> None:
        """Start a run."""
        super().begin(run)
        if self._errors is None:
            self._errors = torch.zeros((run.total,) * 3, dtype=torch.float64)

    def end(self) -> None:
        """Add the run's errors."""
        assert self._errors is not None
        for features in self._run.values():
            steps = sorted(features)
            stacked = torch.stack([features[s].reshape(-1).float() for s in steps])
            places = torch.tensor(steps, dtype=torch.float32)
            for j in range(1, len(steps) - 1):
                ahead = (places[j + 1 :] - places[j])[:, None]
                later = stacked[j + 1 :] - stacked[j]
                for i in range(j):
                    slope = (stacked[j] - stacked[i]) / (steps[j] - steps[i])
                    errors = (later - ahead * slope).abs().mean(1, dtype=torch.float64)
                    self._errors[steps[i], steps[j], steps[j + 1 :]] += errors
        self._run = {}

    def state(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {} if self._errors is None else self.tables()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums."""
        self._errors = state["errors"].clone()
        self._sum = torch.zeros(self._errors.shape[:2], dtype=torch.float64)  # the length of runs

    def tables(self) -> dict[str, Tensor]:
        """Return `errors` float64 [T, T, T]."""
        assert self._errors is not None
        return {"errors": self._errors}

"""Measure for DPCache the errors of lines through two steps at all later ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diffcache.features.collect import RunInfo
from diffcache.features.dpcache import DPCache
from diffcache.offline.fitted_collect import Products


def collector(method: DPCache) -> Lines:
    """Return the collector of the errors."""
    return Lines(method.site)


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

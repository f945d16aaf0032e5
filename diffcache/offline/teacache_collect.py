"""Measure for TeaCache how the output changes where its input does, and fit a polynomial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.accumulated import Accumulated
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import relative_l1
from diffcache.features.teacache import TeaCache
from diffcache.step import Step


class Changes(Collector):
    """Pairs of relative L1 changes: of the input that `TeaCache` compares, and of the stack's output.

    Pairs of neighboring steps in the first guidance branch, as the decision is taken there.
    """

    one_shape: ClassVar[bool] = False

    def __init__(self, method: TeaCache) -> None:
        self.degree, self.of = method.degree, method.compared()
        self.points = torch.zeros(0, 2, dtype=torch.float64)

    def site(self) -> Combine:
        """Return the stack's output, with the input as the probe."""
        return Combine(Accumulated(0.0, of=self.of), Reuse(), feature="output")

    def begin(self, run: RunInfo) -> None:
        """Start a run without pairs."""
        self._probe: Tensor | None = None
        self._index = -1
        self._now: dict[Any, Tensor] = {}
        self._before: dict[Any, Tensor] = {}
        self._inputs: dict[int, float] = {}
        self._outputs: dict[int, float] = {}

    def probe(self, step: Step, value: Tensor) -> None:
        """Note the change of the input."""
        before, self._probe = self._probe, value.detach().clone()
        if before is not None and before.shape == value.shape:
            self._inputs[step.index] = relative_l1(before, self._probe, "forecast")

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> None:
        """Keep one stream of the output of this step; the last word counts."""
        if step.branch:
            return
        if step.index != self._index:
            self._close()
            self._index = step.index
        self._now[site, index, value.shape] = value.detach().float().clone()

    def _close(self) -> None:
        """Compare a finished step's output with that of the step before."""
        now, before = self._now, self._before
        if before and now.keys() == before.keys():
            error = sum(float((now[key] - before[key]).abs().sum()) for key in now)
            scale = sum(float(before[key].abs().sum()) for key in now)
            self._outputs[self._index] = error / scale if scale else math.inf
        self._now, self._before = {}, now

    def end(self) -> None:
        """Add the run's pairs."""
        self._close()
        changes = [(self._inputs[i], self._outputs[i]) for i in self._inputs if i in self._outputs]
        pairs = [pair for pair in changes if all(map(math.isfinite, pair))]
        more = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
        self.points = torch.cat((self.points, more))

    def state(self) -> dict[str, Tensor]:
        """Return the pairs so far."""
        return {"points": self.points}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the pairs that `state` returned."""
        self.points = state["points"].clone()

    def tables(self) -> dict[str, Tensor]:
        """Return the polynomial of least squared error and the range of its inputs.

        Raises:
            ValueError: If there is no pair.
        """
        if not len(self.points):
            raise ValueError("no pair of neighboring steps was seen; calibrate with steps=2 or more")
        coefficients = fit(self.points[:, 0], self.points[:, 1], self.degree)
        low, high = self.points[:, 0].aminmax()
        return {"coefficients": coefficients, "range": torch.stack((low, high)), "points": self.points}

    def settings(self) -> dict[str, Any]:
        """Return the degree and the compared input."""
        return {"degree": self.degree, "input": self.of}


def fit(inputs: Tensor, outputs: Tensor, degree: int) -> Tensor:
    """Return the polynomial through points with the least squared error, float64 `[degree + 1]`, highest power first.

    At least one point is given, float64 `[n]` both; the degree is lower where there are too few different
    inputs for it.
    """
    scale = float(inputs.abs().max()) or 1.0  # powers of small numbers would not be told apart
    used = min(degree, len(inputs.unique()) - 1)
    made = np.polyfit((inputs / scale).numpy(), outputs.numpy(), used)
    padded = np.concatenate((np.zeros(degree - used), made))
    return torch.from_numpy(padded / scale ** np.arange(degree, -1, -1))

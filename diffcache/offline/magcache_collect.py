"""Measure for MagCache how the norms of the residual's tokens change from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.magcache import MagCache
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every
from diffcache.step import Step


class Ratios(Collector):
    """Mean ratios of the norms of the residual's tokens, from step to step.

    The residuals of lists that follow each other are added where they are of one stream, which is
    taken to be so where place and shape agree.
    """

    one_shape: ClassVar[bool] = False

    def __init__(self, method: MagCache) -> None:
        self.sums = torch.zeros(2, 0, dtype=torch.float64)

    def site(self) -> Combine:
        """Return the residual of every list."""
        return Combine(Every(1), Reuse())

    def begin(self, run: RunInfo) -> None:
        """Start a run with nothing kept."""
        run.check_length(self.sums.shape[1])
        if not self.sums.shape[1]:
            self.sums = torch.zeros(2, run.total, dtype=torch.float64)
        self._sums = torch.zeros_like(self.sums)
        self._at: dict[int, int] = {}
        self._now: dict[int, dict[tuple[str, int], Tensor]] = {}
        self._before: dict[int, tuple[int, dict[Any, Tensor]]] = {}

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> None:
        """Add one list's residual of one stream to that of the step."""
        branch = step.branch
        if self._at.get(branch) != step.index:
            self._close(branch)
            self._at[branch] = step.index
        now = self._now.setdefault(branch, {})
        now[site, index] = value.detach().float().clone()  # the last word on a step counts

    def _close(self, branch: int) -> None:
        """Compare a finished step's residual with that of the step before."""
        seen = self._now.pop(branch, None)
        if seen is None:
            return
        now: dict[Any, Tensor] = {}
        for (_, index), value in seen.items():
            key = (index, value.shape)
            now[key] = now[key] + value if key in now else value
        at = self._at[branch]
        last, before = self._before.get(branch, (-1, {}))
        if last == at - 1 and now.keys() == before.keys():
            ratios = [token_norms(now[key]) / (token_norms(before[key]) + 1e-8) for key in now]
            self._sums[0, at] += float(torch.cat(ratios).mean())
            self._sums[1, at] += 1
        self._before[branch] = at, now

    def end(self) -> None:
        """Add the run to the sums."""
        for branch in list(self._now):
            self._close(branch)
        self.sums += self._sums

    def state(self) -> dict[str, Tensor]:
        """Return the sums so far."""
        return {"sums": self.sums}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums that `state` returned."""
        self.sums = state["sums"].clone()

    def tables(self) -> dict[str, Tensor]:
        """Return the ratios, `[T]`, 1 for the first step."""
        return {"ratios": torch.where(self.sums[1] > 0, self.sums[0] / self.sums[1], 1.0)}


def token_norms(value: Tensor) -> Tensor:
    """Return the norm of every token of `[..., D]`, of every place of `[B, C, H, W]`."""
    value = value.movedim(1, -1) if value.ndim > 3 else value
    norms: Tensor = torch.linalg.vector_norm(value, dim=-1)
    return norms.reshape(-1)

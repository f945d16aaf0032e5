"""Likeness of the steps of a run at every module, measured over traced runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.features.bac import BAC, PAIRS, SHIFT, Metric
from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.when import Every
from diffcache.step import Site, Step

THIN = 2**16  # numbers of an activation that are compared, evenly spaced


class PairCollector(Collector):
    """Compares every module's outputs at all pairs of steps.

    Each sample's activations are compared on their own, and samples, guidance branches and runs are averaged.
    """

    def __init__(self, method: BAC) -> None:
        self.metric: Metric = method.metric
        self.sums: dict[str, Tensor] = {}  # site -> [2, T, T]: pairs and shift
        self.samples: dict[str, int] = {}
        self._total = 0
        self._seen: dict[tuple[str, int], dict[int, list[Tensor]]] = {}

    def site(self) -> Combine:
        """Return every attention and feed-forward module."""
        return Combine(Every(1), site=Site.MODULE)

    def begin(self, run: RunInfo) -> None:
        """Start a run with nothing seen, of as many steps as those before."""
        for sums in self.sums.values():
            run.check_length(sums.shape[1])
        self._total, self._seen = run.total, {}

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> None:
        """Keep an output until the end of the run."""
        rows = value.detach().flatten(1) if value.ndim > 1 else value.detach()[:, None]
        width = rows.shape[1]
        if width > THIN:
            rows = rows[:, torch.arange(THIN, device=rows.device) * width // THIN]
        kept = self._seen.setdefault((site, step.branch), {})
        kept.setdefault(step.index, []).append(rows.float().clone())

    def end(self) -> None:
        """Compare the steps of the run, of which every module must have run at each."""
        seen, self._seen = self._seen, {}
        for (site, _), steps in seen.items():
            if len(steps) != self._total:
                raise ValueError(f"{site} ran at {len(steps)} of {self._total} steps; schedules need all")
            rows = torch.stack([torch.cat(steps[i], 1) for i in range(self._total)], 1)
            compared = torch.stack((compare(rows, self.metric), compare(rows, "l1"))).sum(1)
            self.sums[site] = self.sums.get(site, 0) + compared.double().cpu()
            self.samples[site] = self.samples.get(site, 0) + len(rows)

    def state(self) -> dict[str, Tensor]:
        """Return the sums so far."""
        counts = torch.tensor(list(self.samples.values()), dtype=torch.int64)
        # numbered, since files of tensors do not keep their order
        return {f"{i:04}.{site}": sums for i, (site, sums) in enumerate(self.sums.items())} | {"samples": counts}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums of `state`."""
        sites = sorted(name for name in state if name != "samples")
        self.sums = {name.partition(".")[2]: state[name].clone() for name in sites}
        self.samples = dict(zip(self.sums, state["samples"].tolist(), strict=True))

    def tables(self) -> dict[str, Tensor]:
        """Return `pairs.<site>` (the metric) and `shift.<site>` (mean L1), float32 `[T, T]`.

        Raises:
            ValueError: If nothing was seen.
        """
        if not self.sums:
            raise ValueError("no module was seen: the model has no attention or feed-forward site")
        made: dict[str, Tensor] = {}
        for site, sums in self.sums.items():
            pairs, shift = (sums / self.samples[site]).float()
            made |= {PAIRS + site: pairs, SHIFT + site: shift}
        return made

    def settings(self) -> dict[str, Any]:
        """Return the sites in the order in which they run, and the metric."""
        return {"sites": list(self.sums), "metric": self.metric}


def compare(rows: Tensor, metric: Metric) -> Tensor:
    """Return how alike (`cosine`) or how far apart (other metrics) pairs of steps are, `[B, T, T]`.

    Activations are float `[B, T, N]`. `mse` and `l1` are means over the N numbers, `l2` is the norm of the
    difference and `wasserstein` the distance of the two distributions of numbers.
    """
    if metric == "cosine":
        units = functional.normalize(rows, dim=-1)
        return units @ units.transpose(1, 2)
    if metric == "wasserstein":
        rows, metric = rows.sort(-1).values, "l1"
    exact = "donot_use_mm_for_euclid_dist"
    far = torch.cdist(rows, rows, p=1.0 if metric == "l1" else 2.0, compute_mode=exact)
    if metric == "l2":
        return far
    return (far if metric == "l1" else far.square()) / rows.shape[-1]

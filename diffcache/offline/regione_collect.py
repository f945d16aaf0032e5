"""Ratios of RegionE, fitted: the fall of the velocity's norm on edited tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.region_mask import edited_tokens
from diffcache.features.parts.when import Every
from diffcache.features.regione import RegionE, scaled
from diffcache.step import Site, Step


class VelocityRatios(Collector):
    """Fits the ratios: the norm of the guided velocity on edited tokens, step by step.

    For every sample in which something is edited, `|v_i| / |v_(i-1)|` over its edited tokens, as they are chosen at
    the end of the stabilisation stage, of `warmup` steps in a run of 28, by their cosine similarity; the mean over
    samples is divided by `1 - (t_(i-1) - t_i) / 1000`. The grid of the tokens is not known here, so that scattered
    ones are not removed. The paper fits the same curve and does not say how.
    """

    def __init__(self, method: RegionE) -> None:
        self.threshold, self.warmup = method.plan().threshold, method.warmup
        self.sums: Tensor | None = None
        self.count = 0
        self.lengths: Tensor | None = None
        self._clear()

    def _clear(self) -> None:
        self.run: RunInfo | None = None
        self.reference: Tensor | None = None
        self.velocities: list[Tensor] = []
        self.mask: Tensor | None = None

    def site(self) -> Combine:
        """Return the denoiser's output."""
        return Combine(Every(1), Reuse(), Site.MODEL)

    def begin(self, run: RunInfo) -> None:
        """Forget the last run."""
        self._clear()
        if run.sigmas is None:
            raise ValueError("RegionE: its ratios need a flow-matching scheduler, with sigmas")
        self.run = run

    def output(self, step: Step, given: Tensor, value: Tensor) -> None:
        """Keep the tokens of the reference, which lie behind the noisy ones."""
        if self.reference is None:
            self.reference = given.detach()

    def guided(self, step: Step, sample: Tensor, output: Tensor) -> None:
        """Keep the guided velocity; choose the edited tokens at the end of the first stage."""
        assert self.run is not None
        assert self.run.sigmas is not None
        self.velocities.append(output.detach().float())
        if step.index != scaled(self.warmup, self.run.total) - 1:
            return
        tokens = sample.shape[1]
        if self.reference is None or self.reference.shape[1] < 2 * tokens:
            raise ValueError(
                "RegionE: its ratios need a pipeline that edits a reference picture, of the same "
                "size as the result; pass image=..."
            )
        sigmas = self.run.sigmas.to(sample.device)
        clean = sample + (sigmas[-1] - sigmas[step.index]) * output
        self.mask = edited_tokens(clean, self.reference[:, tokens : 2 * tokens], self.threshold, None)

    def end(self) -> None:
        """Add the ratios of the run."""
        if self.run is None or self.mask is None or len(self.velocities) != self.run.total:
            return
        rows = self.mask[..., None]
        norms = torch.stack([(v * rows).flatten(1).norm(dim=1) for v in self.velocities]).double()
        norms = norms[:, self.mask.any(dim=1)].cpu()  # [T, samples]
        times = self.run.timesteps.double().cpu()
        lengths = 1 - (times[:-1] - times[1:]) / 1000
        ratios = (norms[1:] / norms[:-1].clamp_min(1e-12)).sum(dim=1)
        self.sums = ratios if self.sums is None else self.sums + ratios
        self.lengths, self.count = lengths, self.count + norms.shape[1]
        self._clear()

    def state(self) -> dict[str, Tensor]:
        """Return the sums so far."""
        if self.sums is None or self.lengths is None:
            return {}
        count = torch.tensor(self.count)
        return {"sums": self.sums, "lengths": self.lengths, "count": count}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from sums."""
        if state:
            self.sums, self.lengths = state["sums"].clone(), state["lengths"].clone()
            self.count = int(state["count"])

    def tables(self) -> dict[str, Tensor]:
        """Return `gamma`, float64 [T - 1]; raise ValueError if no run edited anything."""
        if self.sums is None or self.lengths is None or not self.count:
            raise ValueError(
                f"RegionE: no token was edited in any run at threshold={self.threshold}; "
                "raise the threshold or use prompts that change the picture"
            )
        return {"gamma": self.sums / self.count / self.lengths}

    def settings(self) -> dict[str, Any]:
        """Return the threshold and the number of samples."""
        return {"threshold": self.threshold, "samples": self.count}

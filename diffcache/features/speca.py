"""Forecast, and compute when a forecast proves wrong at the last block (SpeCa)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Change, Instead, Order, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Taylor
from diffcache.features.parts.when import relative_l1
from diffcache.ranges import Count, Share
from diffcache.step import Step


@dataclass
class Verification:
    """State of a run."""

    outputs: Any  # state of the forecast of the denoiser's output
    index: int = -1  # step of the last decision
    decision: bool = True  # whether that step is computed
    skipped: int | None = None  # steps skipped since the last computed one; None before the first
    checks: bool = False  # whether the output of this step, if it is skipped, is checked
    error: float | None = None  # error of the last forecast that was checked since the last computed step


@dataclass(frozen=True)
class Verified(When):
    """Compute after a skipped step whose output was unlike its forecast.

    Settings are those of `SpeCa`; `forecast` is that of the output.
    """

    threshold: Change
    decay: Share = 0.3
    floor: Share = 0.01
    shortest: Count = 2
    longest: Count = 8
    warmup: Count = 3
    forecast: Instead = field(default_factory=Taylor)
    reads_output: ClassVar[bool] = True  # type: ignore[misc]
    verifies: ClassVar[bool] = True  # type: ignore[misc]

    def check(self) -> None:
        """Raise ValueError if no step would ever be checked."""
        if self.shortest > self.longest:
            raise ValueError(
                f"shortest={self.shortest}: must be at most longest={self.longest}, or no step is ever checked"
            )

    def init(self) -> Verification:
        """Return an empty run."""
        return Verification(self.forecast.init())

    def should_compute(self, state: Verification, step: Step, probe: Tensor | None) -> bool:
        """Return whether a check failed, or enough steps were skipped, in a run whose length must be known."""
        if self.threshold == 0 or state.skipped is None:
            return True
        if step.index == state.index:
            return state.decision
        state.index, state.checks = step.index, state.skipped >= self.shortest
        wrong = state.checks and state.error is not None and state.error > self._limit(step)
        due = step.index < self.warmup or state.skipped >= self.longest
        state.decision = state.skipped > 0 and (due or wrong)
        return state.decision

    def _limit(self, step: Step) -> float:
        """Return the largest error at a step."""
        if step.total is None and self.decay != 1:
            raise AttachError(
                f"decay={self.decay}: a threshold that falls over a run whose length nobody said; "
                "wrap the pipeline, or say it: diffcache.run(model, steps=...); or set decay=1"
            )
        share = step.index / step.total if step.total else 0.0
        return max(float(self.threshold * self.decay**share), self.floor)

    def computed(self, state: Verification, step: Step, probe: Tensor | None) -> None:
        """Count anew."""
        state.index, state.decision, state.skipped, state.error = step.index, True, 0, None

    def returned(self, state: Verification, step: Step, output: Tensor) -> None:
        """Keep the output for forecasts of it."""
        self.forecast.record(state.outputs, step, output.clone())

    def verified(self, state: Verification, step: Step, output: Tensor) -> None:
        """Compare the output of a skipped step with its forecast."""
        state.skipped = (state.skipped or 0) + 1
        if state.checks:
            guess = self.forecast.estimate(state.outputs, step)
            same = guess.shape == output.shape
            state.error = relative_l1(guess, output, ranks=step.ranks) if same else float("inf")

    def held(self, state: Verification) -> list[Tensor]:
        """Return the tensors that the forecast of the output keeps."""
        return self.forecast.held(state.outputs)


@dataclass(frozen=True)
class SpeCa(FeatureMethod):
    """Forecast the stack's output and verify it at the last block, which always runs.

    In a skipped step the last block runs on the forecast of its input, so that the denoiser's
    output can be held against a forecast of its own, `mean|forecast - output| / mean|output|`. If
    that is above the threshold, the next step is computed; checks begin `shortest` skipped steps
    after a computed one, and `longest` are skipped at most. The threshold falls over the run,
    `max(threshold * decay ** (step / steps), floor)`. A computed step is followed by a skipped one,
    in the warm-up as well. Reference: SpeCa, arXiv 2509.11628; the steps that are computed, given
    the errors, are those of its official code for FLUX, which rejects no forecast, but the next.
    Differs: it forecasts every attention and feed-forward output and compares that of the last
    block, element by element, where its threshold is 7; this one forecasts the stack's residuals
    and compares the denoiser's output, and uses the computed block's output, not the forecast one.
    Models whose last block reads outputs of blocks before it (U-Nets, HunyuanDiT) are refused.

    Args:
        threshold: Largest error still taken as none, at the first step (`base_threshold`);
            dimensionless; 0 turns the cache off. The default is that of the official code for DiT.
        decay: Factor by which the threshold falls over the run, 0 to 1 (`decay_rate`).
        floor: Least threshold.
        shortest: Steps that are skipped before a check, at least 1 (`min_taylor_steps`).
        longest: Steps that are skipped in a row at most, at least 1 (`max_taylor_steps`).
        order: Order of the forecasts, 0 to 4 (`max_order`).
        warmup: First steps, at least 1, of which every second one is skipped (`first_enhance`).
    """

    threshold: Change = 0.1
    decay: Share = 0.3
    floor: Share = 0.01
    shortest: Count = 2
    longest: Count = 8
    order: Order = 2
    warmup: Count = 3

    def parts(self) -> Combine:
        """Return the verified schedule, and the forecast of all blocks but the last."""
        forecast = Taylor(self.order, self.warmup - 1)
        spans = self.shortest, self.longest, self.warmup
        when = Verified(self.threshold, self.decay, self.floor, *spans, forecast)
        return Combine(when, forecast, tail=1)

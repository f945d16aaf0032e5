"""Rewriting the times of a scheduler after its `set_timesteps`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.run import Run
from diffcache.errors import AttachError
from diffcache.features.ertacache import check_scheduler


class TimeRule(Protocol):
    """An ability that gives steps other lengths."""

    factors: tuple[float, ...]
    advice: str

    def apply(self, sigmas: Tensor) -> Tensor:
        """Return the adjusted schedule of `sigmas`, [T + 1]."""


class Times(Extension):
    """Replaces the sigmas and timesteps of an Euler scheduler by those of a rule.

    The step of Euler's method needs no more than the sigmas at its two ends, so that any other
    monotonic schedule is as valid; the coefficients of solvers with a memory are not.
    """

    def __init__(self, rule: TimeRule, model: str) -> None:
        self.rule, self.model = rule, model

    def timesteps(self, run: Run, scheduler: Any) -> None:
        """Rewrite the times that were just set; the untouched ones stay to the bit."""
        self.check(scheduler)
        sigmas, timesteps = scheduler.sigmas, scheduler.timesteps
        steps = len(self.rule.factors)
        if len(timesteps) != steps:
            raise AttachError(
                f"{self.model}: its times were measured in runs of {steps} steps, the scheduler "
                f"has {len(timesteps)}; use num_inference_steps={steps} or {self.rule.advice}"
            )
        made = self.rule.apply(sigmas)
        times = made[:-1] * scheduler.config.num_train_timesteps
        scheduler.sigmas = made
        scheduler.timesteps = torch.where(made[:-1] == sigmas[:-1], timesteps, times.to(timesteps))

    def check(self, scheduler: Any) -> None:
        """Raise AttachError unless this is a deterministic Euler scheduler."""
        config = getattr(scheduler, "config", {})
        check_scheduler(self.model, type(scheduler).__name__, config, self.rule.advice)


def install(denoiser: Denoiser, ability: Any) -> Times:
    """Return the extension for a time rule; a known scheduler is checked at once.

    Raises:
        AttachError: If the scheduler is no deterministic Euler scheduler, or there is none.
    """
    times = Times(ability, denoiser.anatomy.model)
    if denoiser.handle.target() is denoiser.model:
        raise AttachError(
            f"{times.model}: a bare model has no scheduler whose times could be changed; wrap the "
            f"pipeline, or {ability.advice}"
        )
    times.check(denoiser.handle.scheduler)
    return times

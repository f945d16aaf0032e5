"""Report the noise level and token grid of each call; rewrite the times of a scheduler."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.run import Run
from diffcache.errors import AttachError
from diffcache.features.ertacache import SigmaRule, check_scheduler
from diffcache.features.seacache import SceneRule
from diffcache.step import Scene

SIZES = ("num_frames", "height", "width")  # arguments that speak of a grid

# Denoisers of flow matching by what their timestep is: a number of times the noise level, or of
# times the signal's weight. As the pipelines of diffusers call them.
OF_NOISE = {
    1.0: "Flux Flux2 QwenImage Chroma AuraFlow",
    1000.0: "Bria SD3 Sana CogView4 HiDreamImage Wan WanAnimate HunyuanVideo LTXVideo LTX2Video Kandinsky5 SkyReelsV2",
}
OF_SIGNAL = {1.0: "ZImage Lumina2", 1000.0: "Mochi"}


def level_at(model: str, timestep: float | None) -> float | None:
    """Return the noise level, 0 to 1, at a timestep of a denoiser of a class; None where it is not known."""
    family = re.sub(r"Transformer(2D|3D|)(Model)?$", "", model)
    for table, turned in ((OF_NOISE, False), (OF_SIGNAL, True)):
        for scale, names in table.items():
            if timestep is not None and family in names.split():
                level = 1 - timestep / scale if turned else timestep / scale
                return min(max(level, 0.0), 1.0) if -1e-3 < level < 1.001 else None
    return None


class NoiseLevels(Extension):
    """Adds the noise level and the token grid to the step of every call.

    Args:
        denoiser: The attachment to the network.
        rule: The ability.
    """

    def __init__(self, denoiser: Denoiser, rule: SceneRule) -> None:
        self.rule, self.model = rule, denoiser.anatomy.model

    def timesteps(self, run: Run, scheduler: Any) -> None:
        """Note the weights of signal and noise at every timestep."""
        run.storage[self] = weights_of(scheduler)

    def open(self, call: Call) -> Call:
        """Return the call with the noise level and the grids in its step."""
        if call.writes:
            return call
        grids = call.branch.storage.get(self)
        if grids is None:  # a run does not change them
            given = self.rule.grid
            grids = grids_of(call.kwargs) if given is None else (given,)
            call.branch.storage[self] = grids
        sample = call.sample
        sizes: tuple[int, ...] = ()
        if self.rule.grid is None and isinstance(sample, Tensor) and sample.dim() > 3:
            sizes = tuple(sample.shape[2:])
        scene = Scene(*self._weights(call), grids, sizes)
        return replace(call, step=replace(call.step, scene=scene))

    def _weights(self, call: Call) -> tuple[float, float]:
        """Return the weights of signal and noise at a call.

        The scheduler tells them, else the user in `diffcache.run`, else ComfyUI's argument, else
        the timestep of a denoiser whose timesteps are known. Raises AttachError if nobody does.
        """
        step = call.timeline.started_at + call.step.index  # of the run: a denoiser may take over in it
        place = call.run.begin + step
        weights: list[tuple[float, float]] = call.run.storage.get(self, [])
        if place < len(weights):
            return weights[place]
        if step < len(call.run.sigmas):
            sigma = call.run.sigmas[step]
            return 1 - sigma, sigma
        options = call.kwargs.get("transformer_options")
        told = options.get("sigmas") if isinstance(options, dict) else None
        if isinstance(told, Tensor) and told.numel():
            sigma = float(told.flatten()[0])
            if 0 <= sigma <= 1:  # of flow matching; others go far beyond
                return 1 - sigma, sigma
        # Steps beyond those that a scheduler announced are of chunks, each at a level of its own,
        # as frames with timesteps of their own are; clean ones, at 0, do not count.
        given = call.kwargs.get("timestep")
        apart = isinstance(given, Tensor) and given[given != 0].unique().numel() > 1
        level = None if weights or apart else level_at(self.model, call.step.timestep)
        if level is not None:
            return 1 - level, level
        raise AttachError(
            f"{self.model}: the noise level of step {call.step.index} is not known, as no "
            "scheduler was heard of; wrap the pipeline, say it in diffcache.run(model, "
            "sigmas=[...]), or use TeaCache"
        )


def weights_of(scheduler: Any) -> list[tuple[float, float]]:
    """Return the weights of signal and noise in the sample at every timestep.

    Raises AttachError if the scheduler has neither the sigmas of a flow nor cumulated alphas.
    """
    config = scheduler.config
    name = type(scheduler).__name__
    flows = config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction"
    if "FlowMatch" in name or flows:
        sigmas = scheduler.sigmas[: len(scheduler.timesteps)].tolist()
        pairs = [(1 - sigma, sigma) for sigma in sigmas]
        return [(noise, signal) for signal, noise in pairs] if config.get("invert_sigmas") else pairs
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None:
        raise AttachError(
            f"{name}: neither a flow's sigmas nor alphas_cumprod tell its noise levels; use "
            "another scheduler, or TeaCache"
        )
    places = torch.as_tensor(scheduler.timesteps).round().long().clamp(0, len(alphas) - 1)
    levels = alphas[places.to(alphas.device)].tolist()
    return [(math.sqrt(alpha), math.sqrt(1 - alpha)) for alpha in levels]


def grids_of(kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the token grids that the arguments of a call speak of.

    Position ids (`[T, axes]` tensors called `..._ids`), shapes (`[[(F, H, W)]]` lists called
    `..._shapes`) and sizes called `num_frames`, `height` and `width`.
    """
    found: list[tuple[int, ...]] = []
    for name, value in kwargs.items():
        if name.endswith("ids") and isinstance(value, Tensor) and value.dim() in (2, 3):
            rows = value.reshape(-1, *value.shape[-2:])[0]
            counts = tuple(len(column.unique()) for column in rows.unbind(-1))
            found.append(tuple(count for count in counts if count > 1) or (1,))
        elif name.endswith("shapes"):
            found += _tuples(value)
    sizes = tuple(kwargs[name] for name in SIZES if isinstance(kwargs.get(name), int))
    return (*found, sizes) if sizes else tuple(found)


def _tuples(value: Any) -> list[tuple[int, ...]]:
    """Return the tuples of whole numbers inside nested lists."""
    if not isinstance(value, (list, tuple)):
        return []
    if value and all(isinstance(item, int) for item in value):
        return [tuple(value)]
    return [found for item in value for found in _tuples(item)]


# times of a scheduler -----------------------------------------------------------------------------


class Times(Extension):
    """Replaces the sigmas and timesteps of an Euler scheduler by those of a rule.

    The step of Euler's method needs no more than the sigmas at its two ends, so that any other
    monotonic schedule is as valid; the coefficients of solvers with a memory are not.

    Raises:
        AttachError: If the scheduler is no deterministic Euler scheduler, or there is none.
    """

    def __init__(self, denoiser: Denoiser, rule: SigmaRule) -> None:
        self.rule, self.model = rule, denoiser.anatomy.model
        if denoiser.handle.target() is denoiser.model:
            raise AttachError(
                f"{self.model}: a bare model has no scheduler whose times could be changed; wrap the "
                f"pipeline, or {rule.advice}"
            )
        self.check(denoiser.handle.scheduler)

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

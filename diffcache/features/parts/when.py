"""When to compute: every n steps, listed steps, a table by site, or a gate on a probe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from diffcache.features.base import Change, Instead, Probe, Spacing, Warmup, When, check_int
from diffcache.features.parts.instead import Reuse
from diffcache.kernels.distance import l1_sums
from diffcache.step import Step


@dataclass
class LastComputed:
    """The index of the last computed step of a run."""

    index: int | None = None


@dataclass(frozen=True)
class Every(When):
    """Compute the first `warmup` steps, then one step in `every`.

    After the warm-up `every - 1` steps are skipped between computed ones; the last step is not
    forced (TaylorSeer, official schedule; FORA with `warmup=1`).

    Args:
        every: Interval in steps; 1 computes all.
        warmup: First steps that are always computed, at least 1.
    """

    state: ClassVar[type] = LastComputed

    every: Spacing
    warmup: Warmup = 1

    def should_compute(self, state: LastComputed, step: Step, probe: Tensor | None) -> bool:
        """Return whether the step is warm-up or `every` steps after the last computed one."""
        return state.index is None or step.index < self.warmup or step.index - state.index >= self.every

    def computed(self, state: LastComputed, step: Step, probe: Tensor | None) -> None:
        """Start the interval anew."""
        state.index = step.index


@dataclass(frozen=True)
class Listed(When):
    """Compute the listed steps; the first step is always computed.

    Args:
        steps: Step indices from 0.
        total: Number of steps of the runs the list is made for, None for any.

    Raises:
        ValueError: If `steps` holds anything but whole numbers of at least 0 and below `total`.
    """

    steps: tuple[int, ...]
    total: int | None = None

    def __init__(self, steps: Iterable[int], total: int | None = None) -> None:
        listed = tuple(sorted(set(steps)))
        if total is not None:
            check_int("total", total, 1)
        for index in listed:
            check_int("steps", index, 0)
            if total is not None and index >= total:
                raise ValueError(f"steps: {index} is beyond total={total}")
        object.__setattr__(self, "steps", listed)
        object.__setattr__(self, "total", total)

    def should_compute(self, state: None, step: Step, probe: Tensor | None) -> bool:
        """Return whether the step is listed."""
        return step.index == 0 or step.index in self.steps


@dataclass(frozen=True)
class Table(When):
    """Compute every site at its own steps.

    Args:
        steps: Site name -> indices of its computed steps, from 0; the first step is always
            computed. Sites that are not named are computed at every step.
        total: Number of steps of the runs it is made for, None for any.

    Raises:
        ValueError: If no site is named, or a step is no whole number from 0 to `total - 1`.
    """

    steps: tuple[tuple[str, tuple[int, ...]], ...]
    total: int | None

    def __init__(
        self, steps: Mapping[str, Iterable[int]] | Iterable[tuple[str, Iterable[int]]], total: int | None = None
    ) -> None:
        if total is not None:
            check_int("total", total, 1)
        given = steps.items() if isinstance(steps, Mapping) else steps
        made = tuple((str(site), tuple(sorted({0, *listed}))) for site, listed in given)
        if not made:
            raise ValueError(f"steps={steps!r}: must name at least one site")
        for site, listed in made:
            for index in listed:
                check_int(f"steps[{site!r}]", index, 0)
                if total is not None and index >= total:
                    raise ValueError(f"steps[{site!r}]: {index} is beyond total={total}")
        object.__setattr__(self, "steps", made)
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "_at", {site: frozenset(listed) for site, listed in made})

    @property
    def sites(self) -> tuple[str, ...]:
        """The named sites."""
        return tuple(site for site, _ in self.steps)

    def should_compute(self, state: None, step: Step, probe: Tensor | None) -> bool:
        """Return True: the sites decide."""
        return True

    def computes_at(self, step: Step, site: str) -> bool:
        """Return whether the site is computed at this step."""
        listed: frozenset[int] = self._at[site]  # type: ignore[attr-defined]
        return step.index in listed


@dataclass
class GateState:
    """The state of a gate in a run: its forecast, the last computed step, its probe's shape."""

    forecast: Any
    index: int | None = None
    shape: torch.Size | None = None


@dataclass(frozen=True)
class Gate(When):
    """Skip while a cheap probe is where a forecast says it should be.

    The relative L1 error `mean|forecast - probe| / mean|reference|` is compared with the
    threshold, in float32; the reference is the probe itself (`relative_to="probe"`) or the
    forecast (`relative_to="forecast"`). Reading it makes an accelerator wait once a step.

    Args:
        threshold: Errors below it skip the step; dimensionless; 0 turns the cache off.
        warmup: First steps that are always computed, at least 1.
        of: Name of the probe: the lead blocks' `residual` or `output`, or the `modulated` input of
            the first attention.
        forecast: Forecast of the probe; plain reuse compares with the last computed step.
        relative_to: Divisor of the error: the `probe` or the `forecast`.
        last: Whether the last step of the run is always computed.
        by_branch: Whether every guidance branch decides for itself.
    """

    threshold: Change
    warmup: Warmup = 1
    of: Literal["residual", "output", "modulated"] = "residual"
    forecast: Instead = field(default_factory=Reuse)
    relative_to: Literal["probe", "forecast"] = "forecast"
    last: bool = False
    by_branch: bool = False

    @property
    def probe(self) -> Probe:
        """Probe that is compared."""
        return self.of

    def init(self) -> GateState:
        """Return an empty run."""
        return GateState(self.forecast.init())

    def should_compute(self, state: GateState, step: Step, probe: Tensor | None) -> bool:
        """Return whether the probe left its forecast by `threshold` or more."""
        if state.index is None or step.index < self.warmup or (self.last and step.is_last):
            return True
        if probe is None:
            raise ValueError("a gate needs a probe; give the method lead=1 or more")
        if probe.shape != state.shape:  # other tokens, of which nothing is foretold
            return True
        guess = self.forecast.estimate(state.forecast, step)
        return not relative_l1(guess, probe, self.relative_to, step.ranks) < self.threshold

    def computed(self, state: GateState, step: Step, probe: Tensor | None) -> None:
        """Let the forecast learn the probe of a computed step."""
        state.index = step.index
        if probe is not None:
            if probe.shape != state.shape:
                state.forecast, state.shape = self.forecast.init(), probe.shape
            self.forecast.record(state.forecast, step, probe.detach().clone())

    def held(self, state: GateState) -> list[Tensor]:
        """Return the tensors that the forecast of the probe keeps."""
        return self.forecast.held(state.forecast)


def relative_l1(guess: Tensor, probe: Tensor, relative_to: str = "probe", ranks: Any = None) -> float:
    """Return `mean|guess - probe| / mean|reference|` in float32, of one shape; waits for the device.

    The reference is the `probe` or the `forecast` (the guess). Over all `ranks` that share the
    sample (`Step.ranks`), since those of a context-parallel model each see a part of the tokens and
    must decide alike; None for one process. 0 where both are zero, infinity where only the
    reference is.
    """
    pair = (probe, guess) if relative_to == "forecast" else (guess, probe)
    error, scale = _l1_totals(*pair, ranks)
    if error == 0:
        return 0.0
    return float(error / scale) if scale else math.inf


def l1_means(values: Tensor, reference: Tensor, ranks: Any = None) -> tuple[float, float]:
    """Return `mean|values - reference|` and `mean|reference|` in float32, of one shape; waits for the device.

    Over several `ranks` that share the sample the means are of each one's numbers, added up.
    """
    error, scale = _l1_totals(values, reference, ranks)
    count = max(reference.numel(), 1)
    return error / count, scale / count


def _l1_totals(values: Tensor, reference: Tensor, ranks: Any) -> tuple[float, float]:
    """Return the sums of `|values - reference|` and `|reference|` over all ranks."""
    both = l1_sums(values, reference)
    if ranks is not None:
        torch.distributed.all_reduce(both, group=ranks)
    error, scale = both.tolist()
    return error, scale


def steps_of(when: When, total: int) -> tuple[int, ...]:
    """Return the computed steps of a schedule that needs no probe, in a run of `total` steps."""
    state, steps = when.init(), []
    for index in range(total):
        step = Step(index, total=total)
        if when.should_compute(state, step, None):
            when.computed(state, step, None)
            steps.append(index)
    return tuple(steps)

"""When to compute: where the changes of an indicator, step by step, added up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from diffcache.features.base import Change, Probe, When, check_int, is_number
from diffcache.features.parts.when import relative_l1
from diffcache.ranges import Count
from diffcache.step import Step


class Indicator(ABC):
    """Turn a probe into a value to compare from step to step, and its changes into errors."""

    def see(self, probe: Tensor, step: Step) -> Tensor:
        """Return the value to compare; a tensor of its own."""
        return probe.detach().clone()

    @abstractmethod
    def error(self, change: float) -> float:
        """Return the error that a relative L1 change counts as."""


@dataclass(frozen=True)
class Rescaled(Indicator):
    """A polynomial of the change.

    Args:
        coefficients: Highest power first; (1, 0) is the change itself.
        low: Changes below it count as it.
        high: Changes above it count as it: a polynomial means nothing outside of what it was
            fitted to.
    """

    coefficients: tuple[float, ...] = (1.0, 0.0)
    low: float = -math.inf
    high: float = math.inf

    def error(self, change: float) -> float:
        """Return the polynomial's value."""
        total, change = 0.0, min(max(change, self.low), self.high)
        for coefficient in self.coefficients:
            total = total * change + coefficient
        return total


@dataclass
class Sum:
    """State of an accumulating gate in a run."""

    anchor: int = -1  # the last computed step, -1 before the first
    index: int = -1  # the last step that was seen
    total: float = 0.0  # sum of the errors that the changes since the anchor count for
    value: Tensor | None = None  # tensor that was compared at that step, None before the first


@dataclass(frozen=True)
class Accumulated(When):
    """Skip while the changes of an indicator, step by step, add up to little.

    The first steps are always computed, and the last one if `last` says so; after a computed step
    the sum starts at 0. The question whether to compute leaves in the state what was seen at the
    step; asked again, the answer is the same.

    Args:
        threshold: Sums below it skip the step; 0 turns the cache off.
        indicator: Tensor that is compared, and error that its change counts for.
        warmup: First steps that are always computed, at least 1, or a share of the run below 1.
        longest: Steps that are skipped in a row at most, None for any number.
        last: Whether the last step of the run is always computed.
        of: Name of the probe: the `modulated` input of the first attention, the `time` embedding,
            or its `time-projection`.
        by_branch: Whether every guidance branch adds up its own changes and decides for itself.
    """

    state: ClassVar[type] = Sum

    threshold: Change
    indicator: Indicator = field(default_factory=Rescaled)
    warmup: float = 1
    longest: Count | None = None
    last: bool = True
    of: Probe = "modulated"
    by_branch: bool = False

    def check(self) -> None:
        """Raise ValueError unless the warm-up is a number of steps, or a share of the run."""
        if not (is_number(self.warmup) and 0 < self.warmup < 1):
            why = " (the first step has nothing to stand in for it), or a share below 1 of the run"
            check_int("warmup", self.warmup, 1, why)

    @property
    def probe(self) -> Probe:
        """Return which probe is compared from step to step."""
        return self.of

    def should_compute(self, state: Sum, step: Step, probe: Tensor | None) -> bool:
        """Return whether the sum reached the threshold."""
        if state.value is None or step.index == state.anchor or (self.last and step.is_last):
            return True
        limit = math.inf if self.longest is None else self.longest
        if step.index < self._first(step.total) or step.index - state.anchor > limit:
            return True
        if probe is None:
            raise ValueError(f"a gate needs a probe, and was given none ({self.of})")
        if step.index != state.index:
            value = self.indicator.see(probe, step)
            if value.shape != state.value.shape:  # other tokens, which cannot be compared
                return True
            change = relative_l1(state.value, value, "forecast", step.ranks)
            state.total += self.indicator.error(change)
            state.index, state.value = step.index, value
        return not state.total < self.threshold

    def _first(self, total: int | None) -> float:
        """Return how many first steps of a run of `total` are always computed."""
        if self.warmup >= 1:
            return self.warmup
        if total is None:
            raise ValueError(
                f"warmup={self.warmup}: a share of a run whose length nobody said; give a number "
                "of steps, or say it: diffcache.run(model, steps=...)"
            )
        return self.warmup * total

    def computed(self, state: Sum, step: Step, probe: Tensor | None) -> None:
        """Start the sum anew."""
        if step.index != state.index and probe is not None:
            state.index, state.value = step.index, self.indicator.see(probe, step)
        state.anchor, state.total = step.index, 0.0

    def held(self, state: Sum) -> list[Tensor]:
        """Return the value of the last step."""
        return [] if state.value is None else [state.value]

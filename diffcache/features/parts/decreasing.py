"""When to compute: at an interval that shrinks over the run (ProfilingDiT)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from diffcache.features.base import When, check_int
from diffcache.features.parts.when import LastComputed
from diffcache.ranges import Count, Whole
from diffcache.step import Step


@dataclass(frozen=True)
class Decreasing(When):
    """Compute at an interval that shrinks over the run.

    With `T_s = longest - (longest - shortest) * (s - warmup) / (S - warmup)` a step `s` after the
    warm-up is computed when `s mod T_s == 0` (ProfilingDiT, arXiv 2504.03140, section 3). The
    paper does not say how `T_s` becomes a whole number: here it is rounded to the nearest one,
    halves up. Where `T_s` changes, a gap can be longer than `T_s` by the paper's own rule.

    Args:
        longest: Interval after the warm-up, in steps.
        shortest: Interval that the end of the run comes near, in steps; at most `longest`.
        warmup: First steps that are always computed; the first one is in any case.
        total: Number of steps S of the run; None takes the run's own.
    """

    state: ClassVar[type] = LastComputed

    longest: int
    shortest: Count
    warmup: Whole = 0
    total: Count | None = None

    def check(self) -> None:
        """Raise ValueError unless the interval shrinks."""
        check_int("longest", self.longest, self.shortest, f" (shortest is {self.shortest})")

    def interval(self, index: int, total: int) -> int:
        """Return the interval at a step of a run of `total` steps."""
        span = max(total - self.warmup, 1)
        exact = self.longest - (self.longest - self.shortest) * (index - self.warmup) / span
        return max(math.floor(exact + 0.5), 1)

    def should_compute(self, state: LastComputed, step: Step, probe: Tensor | None) -> bool:
        """Return whether the step is warm-up or a multiple of its interval; the length of the run must be known."""
        total = step.total if self.total is None else self.total
        if total is None:
            raise ValueError(
                "interval='decreasing': the number of steps is not known; wrap the pipeline, whose "
                "scheduler says it, or set total=50"
            )
        if state.index is None or step.index < self.warmup:
            return True
        return step.index % self.interval(step.index, total) == 0

    def computed(self, state: LastComputed, step: Step, probe: Tensor | None) -> None:
        """Note that there is something to reuse."""
        state.index = step.index

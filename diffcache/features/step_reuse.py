"""Reuse an output for the next steps where it was like the one before (SGLang's step reuse)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from diffcache.features.base import Change, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.when import relative_l1
from diffcache.ranges import Count, Range
from diffcache.step import Site, Step


@dataclass
class Reusable:
    """State of a run: the last computed step, its output, and whether a window is open after it."""

    anchor: int = -1
    output: Tensor | None = None
    is_open: bool = False


@dataclass(frozen=True)
class AfterAlike(When):
    """Skip the next steps after an output that was like the computed one before it.

    Settings are those of `StepReuse`.
    """

    state: ClassVar[type] = Reusable

    threshold: Change
    longest: Count = 1
    warmup: Annotated[int, Range(2), " (two outputs are compared)"] = 2
    last: bool = True
    reads_output: ClassVar[bool] = True  # type: ignore[misc]

    def should_compute(self, state: Reusable, step: Step, probe: Tensor | None) -> bool:
        """Return whether no window is open at the step."""
        if step.index < self.warmup or (self.last and step.is_last):
            return True
        return not state.is_open or step.index - state.anchor > self.longest

    def computed(self, state: Reusable, step: Step, probe: Tensor | None) -> None:
        """Close the window."""
        state.anchor, state.is_open = step.index, False

    def returned(self, state: Reusable, step: Step, output: Tensor) -> None:
        """Open a window where the output is like the computed one before."""
        before, state.output = state.output, output.clone()
        if before is not None and before.shape == output.shape:
            state.is_open = relative_l1(output, before, ranks=step.ranks) < self.threshold


@dataclass(frozen=True)
class StepReuse(FeatureMethod):
    """Reuse the denoiser's output for the next steps, where it was like the one before.

    Two outputs of computed steps are compared, `mean|new - old| / mean|old|`; below `threshold` the
    newer one stands in for the next `longest` steps, and then one is computed whatever comes. What
    was reused is never compared. Nothing is looked at in a skipped step, so it costs nothing but
    what the model does outside its blocks. Reference: `StepReuseController` of SGLang, with the
    velocity as what is observed (`post_cfg_velocity`) and its forced first two and last steps.
    Differs: the velocity of the first guidance branch decides for all; `step_reuse` on SGLang's
    models with TeaCache's hooks observes the modulated input of the first block.

    Args:
        threshold: Smallest change after which the next step is computed; dimensionless; 0 turns the
            cache off.
        longest: Steps that one output stands in for (`max_skip_steps`).
        warmup: First steps that are always computed, at least 2.
        last: Whether the last step of the run is always computed, as it is where it writes to a
            session.
    """

    threshold: Change = 0.1
    longest: Count = 1
    warmup: int = 2
    last: bool = True

    def parts(self) -> Combine:
        """Return windows after outputs that were alike, and reuse."""
        when = AfterAlike(self.threshold, self.longest, self.warmup, self.last)
        return Combine(when, site=Site.MODEL)

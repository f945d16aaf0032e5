"""Make the unguided output from the guided one, in two bands of frequencies (FasterCache)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Instead, Spacing, When, length_of
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.when import Every
from diffcache.ranges import Range, Share
from diffcache.step import Site, Step

# Shares of the run in which a band of the difference is scaled up: those of diffusers, whose
# timesteps 901 to 99 and 301 to -1 they are where timesteps are evenly spaced.
LOW, HIGH = (0.1, 0.9), (0.7, 1.0)
Factor = Annotated[float, Range(0, 10)]  # of a band, at each skipped step
CHANNELS_LAST = ("Kandinsky5Transformer3DModel", "Kandinsky6Transformer3DModel")


def bands_of(values: Tensor) -> list[Tensor]:
    """Return the low and the high frequencies of `[B, ..., H, W]` over height and width, float32.

    Low are frequencies within a fifth of the shorter side.
    """
    values = values.float()
    height, width = values.shape[-2:]
    rows = torch.fft.fftfreq(height, 1 / height, device=values.device).round()
    columns = torch.fft.rfftfreq(width, 1 / width, device=values.device).round()
    is_low = rows[:, None] ** 2 + columns**2 <= (min(height, width) // 5) ** 2
    low = torch.fft.irfft2(torch.fft.rfft2(values) * is_low, s=(height, width))
    return [low, values - low]


@dataclass
class Bands:
    """The bands of a difference and the step of it; the output itself in the first branch."""

    tensors: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    anchor: int = 0


@dataclass(frozen=True)
class ScaledBands(Instead):
    """Reuse a difference of guidance branches, its bands scaled up at each skipped step.

    Settings are those of `FasterCache`.
    """

    state: ClassVar[type] = Bands

    low: Factor = 1.1
    high: Factor = 1.1

    def record(self, state: Bands, step: Step, feature: Tensor) -> None:
        """Keep the bands of the difference; raise AttachError if it has no height and width."""
        state.anchor, state.dtype, state.tensors = step.index, feature.dtype, [feature]
        if step.branch == 0:
            return
        if feature.dim() < 4:
            raise AttachError(
                f"the output of shape {list(feature.shape)} has no axes of height and width, over "
                "which FasterCache takes frequencies; use another method, such as TaylorSeer"
            )
        state.tensors = bands_of(feature)

    def estimate(self, state: Bands, step: Step) -> Tensor:
        """Return the sum of the scaled bands; at the step just recorded, the feature itself."""
        if len(state.tensors) == 1:
            return state.tensors[0]
        low, high = state.tensors
        skipped = range(state.anchor + 1, step.index + 1)
        total = step.total or 1
        a = self.low ** sum(LOW[0] <= index / total <= LOW[1] for index in skipped)
        b = self.high ** sum(HIGH[0] <= index / total <= HIGH[1] for index in skipped)
        return torch.add(low * a, high, alpha=b).to(state.dtype)


@dataclass(frozen=True)
class GuidedEvery(When):
    """Compute the first guidance branch at every step, and the others at one step in `every`.

    Settings are those of `FasterCache`.
    """

    every: Spacing = 5
    start: Share = 0.36
    by_branch: ClassVar[bool] = True  # type: ignore[misc]

    def should_compute(self, state: None, step: Step, probe: Tensor | None) -> bool:
        """Return whether the branch is the first one, or computed at this step of a run whose length must be known."""
        if step.branch == 0 or step.index % self.every == 0:
            return True
        total = length_of(step, f"start={self.start}: a share of a run whose length nobody said")
        return step.index / total < self.start


@dataclass(frozen=True)
class FasterCache(FeatureMethod):
    """Make the unguided output from the guided one at all but one step in `every`.

    The difference of both outputs is kept in two bands of frequencies over height and width, and
    added to the guided output of skipped steps; the low band is scaled up over most of the run, the
    high one at its end. Reference: FasterCache, arXiv 2410.19355, equations 9 to 11 (CFG-Cache), in
    the form of diffusers; its other part, attention reused with a slope, is left out. Differs:
    parts of the run are shares of its steps, where diffusers has timesteps; guidance is two calls a
    step, the guided one first, where diffusers splits one batch. With guidance in one batch there
    is no second branch, so that nothing is skipped.

    Args:
        every: Interval in steps at which both branches are computed; 1 turns the cache off.
        start: Share of the run before which all is computed, 0 to 1.
        low: Factor of low frequencies of the difference at each skipped step, 0 to 10.
        high: Factor of high frequencies.
    """

    every: Spacing = 5
    start: Share = 0.36
    low: Factor = 1.1
    high: Factor = 1.1

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise AttachError for models whose outputs have height and width on other axes."""
        if facts["model"] in CHANNELS_LAST and self.every > 1:
            raise AttachError(
                f"{facts['model']}: its output has channels last, so that FasterCache's bands "
                "would not be of height and width; use another method, such as TaylorSeer"
            )

    def parts(self) -> Combine:
        """Return the schedule by branch, and the scaled difference to the guided output."""
        when, instead = GuidedEvery(self.every, self.start), ScaledBands(self.low, self.high)
        if self.every == 1:
            return Combine(Every(1), site=Site.MODEL)
        return Combine(when, instead, Site.MODEL, feature="guidance")

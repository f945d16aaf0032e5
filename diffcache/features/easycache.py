"""Skip while the output should have changed little, by a rate measured online (EasyCache)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from diffcache.features.base import Change, Probe, Warmup, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.when import l1_means
from diffcache.step import Site, Step

Since = Literal["step", "computed"]


@dataclass
class Rates:
    """State of a gate that measures a rate."""

    index: int = -1  # step whose change was added last
    total: float = 0.0  # sum of the expected changes since the last computed step
    rate: float | None = None  # mean change of the output over that of the sample, between two computed steps
    seen: Tensor | None = None  # sample that the next change is taken from
    now: Tensor | None = None  # sample of the step that is being computed
    sample: Tensor | None = None  # sample of the last computed step
    output: Tensor | None = None  # output of the last computed step


@dataclass(frozen=True)
class Rate(When):
    """Skip while expected changes of the output add up to little.

    The expected change of a step is `rate * mean|sample - seen| / mean|output|`, with the output
    of the last computed step and `rate = mean|change of output| / mean|change of sample|` of the
    last two. After a computed step the sum starts at 0.

    Settings are those of `EasyCache`.
    """

    state: ClassVar[type] = Rates

    threshold: Change
    warmup: Warmup = 1
    since: Since = "step"
    last: bool = True
    reads_output: ClassVar[bool] = True  # type: ignore[misc]

    @property
    def probe(self) -> Probe:
        """Return that the gate looks at the sample."""
        return "sample"

    def should_compute(self, state: Rates, step: Step, probe: Tensor | None) -> bool:
        """Return whether the expected changes reached the threshold."""
        if probe is None:
            raise ValueError("a rate is measured on the sample, which this denoiser is not given")
        if step.index < self.warmup or (self.last and step.is_last):
            return True
        if state.rate is None or state.seen is None or state.output is None:
            return True
        if step.index != state.index:
            if probe.shape != state.seen.shape:
                return True
            change, _ = l1_means(probe, state.seen, step.ranks)
            _, scale = l1_means(state.output, state.output, step.ranks)
            state.index, state.total = step.index, state.total + state.rate * change / (scale or 1)
            if self.since == "step":
                state.seen = probe.detach().clone()
        return not state.total < self.threshold

    def computed(self, state: Rates, step: Step, probe: Tensor | None) -> None:
        """Start the sum anew."""
        state.index, state.total = step.index, 0.0
        state.now = None if probe is None else probe.detach().clone()

    def returned(self, state: Rates, step: Step, output: Tensor) -> None:
        """Measure the rate between this computed step and the one before."""
        before, state.sample = state.sample, state.now
        state.seen = state.sample
        if self.since == "step" and state.sample is not None:
            state.seen = state.sample.clone()  # held from here on, as it will be at skipped steps
        old, state.output, state.rate = state.output, output.clone(), None
        if before is None or old is None or state.sample is None:
            return
        if before.shape == state.sample.shape and old.shape == output.shape:
            moved, _ = l1_means(state.sample, before, step.ranks)
            state.rate = l1_means(output, old, step.ranks)[0] / moved if moved else None

    def held(self, state: Rates) -> list[Tensor]:
        """Return the samples and the output."""
        tensors = (state.sample, state.seen, state.output)
        return list({id(each): each for each in tensors if each is not None}.values())


@dataclass(frozen=True)
class EasyCache(FeatureMethod):
    """Reuse the denoiser's change of its sample while its output should have changed little.

    Nothing is calibrated: at every computed step the change of the output over that of the sample
    is measured, and foretells the changes of the output at the steps after it, relative to its
    size; a step is skipped while they add up to less than `threshold`. A skipped step returns its
    sample plus the difference of output and sample at the last computed step. Reference:
    EasyCache, arXiv 2507.02860, with the schedule of its official code for HunyuanVideo, which adds
    up the changes from step to step; `since="computed"` takes each from the last computed step, as
    ComfyUI and SGLang do. Differs: the sums are in float32 over the whole sample, of which ComfyUI
    and SGLang take every eighth row or so; the warm-up is counted in steps, where ComfyUI has a
    range of noise levels and measures no rate before it (`warmup` is one more for its schedule).

    Args:
        threshold: Smallest sum that is computed; dimensionless; 0 turns the cache off. 0.025 on
            HunyuanVideo and 0.05 on Wan in the official code; 0.2 in ComfyUI.
        warmup: First steps that are always computed, at least 1; two are in any case.
        since: Sample that a change is taken from: that of the `step` before (official), or that of
            the last `computed` step.
        last: Whether the last step of the run is always computed.
    """

    threshold: Change = 0.05
    warmup: Warmup = 5
    since: Since = "step"
    last: bool = True

    def parts(self) -> Combine:
        """Return the gate on the measured rate, and reuse of the change at the output."""
        when = Rate(self.threshold, self.warmup, self.since, self.last)
        return Combine(when, site=Site.MODEL, feature="change")

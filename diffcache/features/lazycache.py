"""Skip while the predicted clean sample should have changed little (ComfyUI's LazyCache)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Ability, Change, Instead, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.easycache import Rate, Rates
from diffcache.features.parts.when import Every
from diffcache.features.seacache import SceneRule
from diffcache.step import Site, Step

# Denoisers whose output points from the noise to the sample; their pipelines turn its sign, or time.
TURNED = ("HiDreamImage", "Ideogram4", "LuminaNextDiT", "Lumina2", "Mochi", "NucleusMoEImage", "ZImage")


def sigma_of(step: Step) -> float:
    """Return the noise level of a step of flow matching, 0 to 1; raise AttachError if that is not known."""
    scene = step.scene
    if scene is None:
        raise AttachError("the noise level of this call is not known; wrap the pipeline")
    if abs(scene.signal + scene.noise - 1) > 1e-3:
        raise AttachError(
            f"signal {scene.signal:.3f} and noise {scene.noise:.3f} are not those of flow "
            "matching, which LazyCache is for; use EasyCache"
        )
    return scene.noise


@dataclass(frozen=True)
class CleanRate(Rate):
    """A rate of the predicted clean sample, `sample - sigma * output`."""

    needs: ClassVar[tuple[Ability, ...]] = (SceneRule(),)  # type: ignore[misc]

    def should_compute(self, state: Rates, step: Step, probe: Tensor | None) -> bool:
        """Return whether the expected changes reached the threshold."""
        return sigma_of(step) == 0 or super().should_compute(state, step, probe)

    def returned(self, state: Rates, step: Step, output: Tensor) -> None:
        """Measure the rate between this computed step and the one before."""
        if state.now is None:
            raise AttachError("the sample is no single tensor; use another method, such as SeaCache")
        sample = state.now[tuple(map(slice, output.shape))]  # without added channels or tokens
        super().returned(state, step, sample - sigma_of(step) * output)


@dataclass
class ScaledOutput:
    """The last computed output and the noise level of its step."""

    features: list[Tensor] = field(default_factory=list)
    sigma: float = 1.0


@dataclass(frozen=True)
class CleanChange(Instead):
    """Let the predicted clean sample differ from the sample as at the last computed step.

    The difference is `-sigma * output`, so the stand-in is the last output times the ratio of the
    noise levels.
    """

    state: ClassVar[type] = ScaledOutput

    def record(self, state: ScaledOutput, step: Step, feature: Tensor) -> None:
        """Keep the output and its noise level."""
        state.features, state.sigma = [feature], sigma_of(step)

    def estimate(self, state: ScaledOutput, step: Step) -> Tensor:
        """Return the scaled output; at the step that was just recorded, the output itself."""
        ratio = state.sigma / (sigma_of(step) or state.sigma or 1)
        return state.features[0] if ratio == 1 else state.features[0] * ratio


@dataclass(frozen=True)
class LazyCache(FeatureMethod):
    """Reuse the denoiser's change of its sample while the clean sample should stay as it is.

    As EasyCache with `since="computed"`, but measured on the clean sample that the denoiser
    predicts, and with the difference of that and the noisy sample reused: a skipped step returns
    the last output times the ratio of the noise levels then and now. Reference: `LazyCache` of
    ComfyUI. Differs: the first guidance branch decides, where ComfyUI looks at the guided
    prediction (the same without guidance); the sums are over the whole sample, of which ComfyUI
    takes every eighth row and column; the warm-up is counted in steps, as in EasyCache. For models
    of flow matching, whose noise levels are known.

    Args:
        threshold: Smallest sum that is computed; dimensionless; 0 turns the cache off. 0.2 in
            ComfyUI.
        warmup: First steps that are always computed, at least 1; two are in any case.
        last: Whether the last step of the run is always computed.
    """

    threshold: Change = 0.2
    warmup: Warmup = 4
    last: bool = True

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise AttachError for models from whose output the clean sample is not taken that way."""
        of_diffusers = bool(facts["settings"])  # networks of ComfyUI turn the sign themselves
        if of_diffusers and facts["model"].startswith(TURNED) and self.threshold > 0:
            raise AttachError(
                f"{facts['model']}: its output points from the noise to the sample, against the "
                "sign that LazyCache takes the clean sample by; use EasyCache"
            )

    def parts(self) -> Combine:
        """Return the gate on the clean sample's rate, and reuse of its change."""
        when = CleanRate(self.threshold, self.warmup, "computed", self.last)
        if self.threshold == 0:  # asks for no noise levels
            return Combine(Every(1), site=Site.MODEL)
        return Combine(when, CleanChange(), Site.MODEL)

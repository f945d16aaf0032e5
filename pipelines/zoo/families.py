"""Methods and the kinds of pipelines they run on; `docs/methods.md` shows it, a test runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diffcache.catalog import make_method
from diffcache.features.base import Method

STEPS = 8
SETTING = dict[str, Any]

# Of a training: enough to have a table
SHORT: SETTING = {"epochs": 2, "refresh": 14, "rate": 1.0, "beta": 1e-2}

# Pipeline of the zoo -> what it is in the table
KINDS = {
    "FluxPipeline": "image, double and single blocks (FLUX)",
    "StableDiffusion3Pipeline": "image, joint blocks (SD 3)",
    "DiTPipeline": "image, class-conditional (DiT)",
    "PixArtAlphaPipeline": "image, cross-attention (PixArt)",
    "WanPipeline": "video, guidance in two calls (Wan)",
    "HunyuanVideoPipeline": "video, double and single blocks (HunyuanVideo)",
    "StableDiffusionPipeline": "image, UNet (Stable Diffusion)",
}
COMMON = (
    "FluxPipeline", "StableDiffusion3Pipeline", "DiTPipeline", "WanPipeline",
    "StableDiffusionPipeline",
)  # fmt: skip
FLOW = ("FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline", "HunyuanVideoPipeline")
TOKENS = ("FluxPipeline", "StableDiffusion3Pipeline", "DiTPipeline", "PixArtAlphaPipeline",
          "WanPipeline")  # fmt: skip
ATTENDING = ("FluxPipeline", "HunyuanVideoPipeline", "WanPipeline", "DiTPipeline")


@dataclass(frozen=True)
class Family:
    """Trial of a method on tiny pipelines.

    Attributes:
        pipelines: Names in the zoo.
        settings: Settings that make it skip something in a run of 8 steps.
        off: Settings with which it changes nothing; None where it cannot be told so.
        own: Pipeline -> settings that differ there.
    """

    pipelines: tuple[str, ...]
    settings: SETTING
    off: SETTING | None
    own: dict[str, SETTING] = field(default_factory=dict)

    def method(self, name: str, pipeline: str, *, off: bool = False) -> Method:
        """Return the method for a pipeline, not calibrated."""
        settings = self.off if off else {**self.settings, **self.own.get(pipeline, {})}
        assert settings is not None
        made = {key: value() if isinstance(value, Callable) else value  # type: ignore[arg-type]
                for key, value in settings.items()}  # fmt: skip
        return make_method(name, **made)


FAMILIES: dict[str, Family] = {
    "interval": Family(COMMON, {"every": 3}, {"every": 1}),
    "first-block": Family(COMMON, {"threshold": float("inf")}, {"threshold": 0.0}),
    "taylorseer": Family(COMMON, {"every": 3, "warmup": 2}, {"every": 1}),
    "confidence-gated-taylor": Family(
        COMMON, {"threshold": float("inf"), "warmup": 3}, {"threshold": 0.0}
    ),
    "teacache": Family(TOKENS, {"threshold": 1e9}, {"threshold": 0.0}),
    "magcache": Family(COMMON, {"threshold": float("inf"), "retention": 0.0}, {"threshold": 0.0}),
    "dbcache": Family(
        COMMON, {"threshold": float("inf"), "warmup": 2, "longest": 2}, {"threshold": 0.0}
    ),
    "seacache": Family(COMMON, {"threshold": float("inf")}, {"threshold": 0.0}),
    "ertacache": Family(
        FLOW, {"threshold": 1e9}, {"threshold": 0}, {"WanPipeline": {"time": False}}
    ),
    "fitted-forecast": Family(COMMON, {"computed": 4}, {"computed": STEPS}),
    "bac": Family(COMMON, {"count": 3, "union": 2}, {"count": STEPS}),
    "cachequant": Family(COMMON, {"every": 3}, {"every": 1}),
    "harmonica": Family(TOKENS, {"threshold": 0.5, **SHORT}, {"threshold": 0, **SHORT}),
    "profilingdit": Family(ATTENDING, {"every": 3, "warmup": 1, "share": 0.5}, {"background": ()}),
    "temporal-table": Family(COMMON, {}, {}),
}

# Method -> kinds that other tests run it on, whose calls take more than prompts or classes.
ELSEWHERE = {
    "interval": ("diffusion policy",),
    "bac": ("diffusion policy",),
    "regione": ("image editing (FLUX Kontext)", "image editing (Qwen-Image-Edit)"),
    "tuned": ("image, double and single blocks (FLUX)",),
}

"""Methods, and the models and pipelines they are tested on; `docs/methods.md` shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from diffcache.catalog import make_method
from diffcache.features.base import Method

STEPS = 8
SETTING = dict[str, Any]

ZERO: SETTING = {"threshold": 0.0}
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
    """Trial of a method on tiny pipelines, and on models alone.

    Attributes:
        pipelines: Names in the zoo.
        settings: Settings that make it skip something in a run of 8 steps.
        off: Settings with which it changes nothing; None where it cannot be told so.
        own: Pipeline -> settings that differ there.
        computed: Steps that it computes of 8 on a model alone; None where it needs a pipeline.
        tensors: Kept tensors of each feature, and of the probe.
        alone: Settings that stand in for tables on a model alone.
    """

    pipelines: tuple[str, ...]
    settings: SETTING
    off: SETTING | None
    own: dict[str, SETTING] = field(default_factory=dict)
    computed: tuple[int, ...] | None = None
    tensors: tuple[int, int] = (1, 0)
    alone: SETTING = field(default_factory=dict)

    def method(self, name: str, pipeline: str, *, off: bool = False) -> Method:
        """Return the method for a pipeline, not calibrated."""
        settings = self.off if off else {**self.settings, **self.own.get(pipeline, {})}
        assert settings is not None
        made = {key: value() if isinstance(value, Callable) else value  # type: ignore[arg-type]
                for key, value in settings.items()}  # fmt: skip
        return make_method(name, **made)


FAMILIES: dict[str, Family] = {
    "interval": Family(COMMON, {"every": 3}, {"every": 1}, computed=(0, 3, 6)),
    "first-block": Family(COMMON, {"threshold": inf}, ZERO, computed=(0,), tensors=(1, 1)),
    "taylorseer": Family(COMMON, {"every": 3, "warmup": 2}, {"every": 1}, computed=(0, 1, 4, 7),
                         tensors=(2, 0)),
    "confidence-gated-taylor": Family(COMMON, {"threshold": inf, "warmup": 3}, ZERO,
                                      computed=(0, 1, 2), tensors=(2, 2)),
    "teacache": Family(TOKENS, {"threshold": 1e9}, ZERO, computed=(0,), tensors=(1, 1),
                       alone={"coefficients": (1.0, 0.0)}),
    "magcache": Family(COMMON, {"threshold": inf, "retention": 0.0}, ZERO, computed=(0, 4),
                       alone={"ratios": (1.0,) * STEPS}),
    "dbcache": Family(COMMON, {"threshold": inf, "warmup": 2, "longest": 2}, ZERO,
                      computed=(0, 1, 4, 7), tensors=(1, 1)),
    "seacache": Family(COMMON, {"threshold": inf}, ZERO),
    "ertacache": Family(FLOW, {"threshold": 1e9}, ZERO, {"WanPipeline": {"time": False}}),
    "fitted-forecast": Family(COMMON, {"computed": 4}, {"computed": STEPS}),
    "bac": Family(COMMON, {"count": 3, "union": 2}, {"count": STEPS}),
    "cachequant": Family(COMMON, {"every": 3}, {"every": 1}),
    "harmonica": Family(TOKENS, {"threshold": 0.5, **SHORT}, {"threshold": 0, **SHORT}),
    "profilingdit": Family(ATTENDING, {"every": 3, "warmup": 1, "share": 0.5}, {"background": ()}),
    "temporal-table": Family(COMMON, {}, {}),
}  # fmt: skip

# Method -> kinds that other tests run it on, whose calls take more than prompts or classes.
ELSEWHERE = {
    "interval": ("diffusion policy",),
    "bac": ("diffusion policy",),
    "regione": ("image editing (FLUX Kontext)", "image editing (Qwen-Image-Edit)"),
    "tuned": ("image, double and single blocks (FLUX)",),
}

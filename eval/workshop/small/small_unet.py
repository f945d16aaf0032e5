"""The small StableDiffusionPipeline that draws shapes: how it is loaded and called.

The shipped directory is an ordinary diffusers pipeline that loads with plain `from_pretrained`:

    pipe = load()
    picture = pipe("a small red ring on the left, on a yellow background", **CALL).images[0]
"""

from __future__ import annotations

from typing import Any

from diffusers import StableDiffusionPipeline

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.shipped import loader

DIRECTORY = MODELS / "shapes-unet"
CALL: dict[str, Any] = {"guidance_scale": 3.0}
load = loader(StableDiffusionPipeline, DIRECTORY)

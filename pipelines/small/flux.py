"""The small FluxPipeline that draws shapes: how it is loaded and called.

The shipped directory is an ordinary diffusers pipeline that `FluxPipeline.from_pretrained` loads.
Two defaults are written into the source of `FluxPipeline` for large models (latents of 128 x 128,
512 text tokens) and cannot be saved with a model, so a call has to pass the numbers in `CALL`:

    pipe = load()
    picture = pipe("a small red ring on the left, on a yellow background", **CALL).images[0]
"""

from __future__ import annotations

from typing import Any

from diffusers import FluxPipeline

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.shipped import loader

TEXT_TOKENS = 24
CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS}
DIRECTORY = MODELS / "shapes-flux"
load = loader(FluxPipeline, DIRECTORY, side=CALL["height"])

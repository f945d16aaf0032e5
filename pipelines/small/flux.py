"""The small FluxPipeline that draws shapes: how it is loaded and called.

The shipped directory is an ordinary diffusers pipeline that `FluxPipeline.from_pretrained` loads.
Two defaults are written into the source of `FluxPipeline` for large models (latents of 128 x 128,
512 text tokens) and cannot be saved with a model, so a call has to pass the numbers in `CALL`:

    pipe = load()
    picture = pipe("a small red ring on the left, on a yellow background", **CALL).images[0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.shipped import load_pipeline

TEXT_TOKENS = 24
CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS}
DIRECTORY = MODELS / "shapes-flux"


def load(dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY) -> FluxPipeline:
    """Load the shipped pipeline, with its progress bar off and 64x64 as its default size.

    Args:
        dtype: Dtype of every model in it; the files hold bfloat16.
        directory: Directory of the saved pipeline.
    """
    return load_pipeline(FluxPipeline, directory, dtype, side=CALL["height"])

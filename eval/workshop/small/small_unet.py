"""The small StableDiffusionPipeline that draws shapes: how it is loaded and called.

The shipped directory is an ordinary diffusers pipeline that loads with plain `from_pretrained`:

    pipe = load()
    picture = pipe("a small red ring on the left, on a yellow background", **CALL).images[0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.shipped import load_pipeline

DIRECTORY = MODELS / "shapes-unet"
CALL: dict[str, Any] = {"guidance_scale": 3.0}


def load(
    dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY
) -> StableDiffusionPipeline:
    """Load the shipped pipeline, with its progress bar off.

    Args:
        dtype: Dtype of every model in it; the files hold bfloat16.
        directory: Directory of the saved pipeline.
    """
    return load_pipeline(StableDiffusionPipeline, directory, dtype)

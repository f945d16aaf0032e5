"""Load a small pipeline from its directory, as the module of each model does for its own."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from diffusers import DiffusionPipeline
from torch import nn

from diffcache.pipelines.shipped_models import present

P = TypeVar("P", bound=DiffusionPipeline)


def load_pipeline(
    kind: type[P], directory: str | Path, dtype: torch.dtype, side: int | None = None
) -> P:
    """Load a pipeline with plain `from_pretrained`, all its models in one dtype, no progress bar.

    Args:
        kind: The class of the pipeline.
        directory: Directory of the saved pipeline.
        dtype: Dtype of every model in it; the files hold bfloat16.
        side: Default height and width in pixels; None leaves those of the class.
    """
    pipe: P = kind.from_pretrained(present(directory))
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            nn.Module.to(part, dtype)
    pipe.set_progress_bar_config(disable=True)
    if side is not None:
        pipe.default_sample_size = side // pipe.vae_scale_factor
    return pipe

"""Load a small pipeline from its directory, as the module of each model does for its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import DiffusionPipeline
from torch import nn

from diffcache.pipelines.shipped_models import present

P = TypeVar("P", bound=DiffusionPipeline)


def loader(kind: type[P], directory: Path, side: int | None = None) -> Callable[..., P]:
    """Return what loads the pipeline of a model with plain `from_pretrained`, without progress bar.

    It takes `dtype`, of every model in it (float32 by default, the files hold bfloat16), and
    `directory`, of another saved pipeline.

    Args:
        kind: The class of the pipeline.
        directory: Directory of the shipped pipeline.
        side: Default height and width in pixels; None leaves those of the class.
    """

    def load(dtype: torch.dtype = torch.float32, directory: str | Path = directory) -> P:
        pipe: P = kind.from_pretrained(present(directory))
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                nn.Module.to(part, dtype)
        pipe.set_progress_bar_config(disable=True)
        if side is not None:
            pipe.default_sample_size = side // pipe.vae_scale_factor
        return pipe

    return load

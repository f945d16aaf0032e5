"""The small WanPipeline that films shapes: how it is loaded and called.

The shipped directory is an ordinary diffusers pipeline that `WanPipeline.from_pretrained` loads.
Its source holds the size of large films (480 x 832, 81 frames, guidance 5), which cannot be saved
with a model, so a call has to pass the numbers in `CALL`:

    pipe = load()
    film = pipe("a small red ring on the left, on a yellow background", **CALL).frames[0]
"""

from __future__ import annotations

from typing import Any

from diffusers import WanPipeline

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.shipped import loader

FRAMES = 9
TEXT_TOKENS = 24
CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_frames": FRAMES,
    "max_sequence_length": TEXT_TOKENS,
    "guidance_scale": 3.0,
}
DIRECTORY = MODELS / "shapes-wan"
load = loader(WanPipeline, DIRECTORY)

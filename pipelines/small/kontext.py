"""The small FluxKontextPipeline that edits pictures of shapes: how it is loaded and called.

It starts from the shipped text-to-picture model: the same transformer, autoencoder and text
encoders, with a few words added behind the old ones. `FluxKontextPipeline` has defaults for large
models in its source (a megapixel, 512 text tokens, seventeen preferred sizes), so a call passes the
numbers in `CALL`:

    pipe = load()
    edited = pipe(image=picture, prompt="make the ring green", **CALL).images[0]
"""

from __future__ import annotations

from typing import Any

from diffusers import FluxKontextPipeline

from diffcache.pipelines.small.flux import DIRECTORY as FLUX
from diffcache.pipelines.small.shipped import loader

TEXT_TOKENS = 16
CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "max_area": 64 * 64,
    "_auto_resize": False,
    "max_sequence_length": TEXT_TOKENS,
}
DIRECTORY = FLUX.with_name("shapes-kontext")
load = loader(FluxKontextPipeline, DIRECTORY, side=CALL["height"])

"""The FluxKontextPipeline that edits stickers: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that loads with plain `from_pretrained`. It
starts from sticker-flux and has its sizes, with the words of instructions added. Like that one it
is no distilled model: guidance takes a second call a step, and a call has to pass `CALL`:

    pipe = load()
    edited = pipe(image=picture, prompt="replace the fox with an owl", **CALL).images[0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor, nn

from diffcache.eval.workshop.small.grid import draw_grid
from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.loader import loader
from diffcache.eval.workshop.small.sticker_edits import KINDS, draw_edits, edit_words
from diffcache.eval.workshop.small.sticker_flux import CALL as FLUX_CALL
from diffcache.eval.workshop.small.sticker_flux import HELD, PROMPT_DROPOUT, Flux, build_pipeline, keep_latents, pack
from diffcache.eval.workshop.small.sticker_text import Encoder, learn_words
from diffcache.eval.workshop.small.stickers import render
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-kontext"
GUIDANCE = 2.0
CALL: dict[str, Any] = FLUX_CALL | {"max_area": 64 * 64, "_auto_resize": False, "true_cfg_scale": GUIDANCE}
SHOWN = 24
# What a model of this size learns last stands more than once; held-out edits have all kinds alike.
TRAINED = (*KINDS, "replace", "move", "move", "size")
load = loader(FluxKontextPipeline, DIRECTORY, side=CALL["height"])


class Kontext(Flux):
    """Train denoiser and text encoders by flow matching, with the picture to edit beside the noise.

    The model sees what `FluxKontextPipeline` will show it: tokens of the reference picture after
    those of the noise, with 1 instead of 0 as the first of their position ids. Its instruction is
    left out at times, never its picture.
    """

    call = CALL

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.encoder = Encoder(edit_words())
        references = self.image_ids.clone()
        references[:, 0] = 1
        self.image_ids = torch.cat([self.image_ids, references])

    def gather(self) -> None:
        """Draw edits, and keep the latents of both pictures."""
        self.edits = draw_edits(self.settings.examples, self.settings.seed + 1, kinds=TRAINED)
        self.held_edits = draw_edits(HELD, self.settings.seed + 2, held=True)
        self.held_texts = [edit.text for edit in self.held_edits]
        scenes = {
            "after": [edit.after for edit in self.edits],
            "before": [edit.before for edit in self.edits],
            "held_after": [edit.after for edit in self.held_edits],
            "held_before": [edit.before for edit in self.held_edits],
        }
        kept = keep_latents(self.folder, self.autoencoder, scenes)
        self.latents, self.references = kept["after"], kept["before"]
        here = torch.get_default_device()
        self.held = pack(kept["held_after"].float()).to(here)
        self.held_references = pack(kept["held_before"].float()).to(here)

    def build(self) -> nn.ModuleDict:
        """Build the denoiser and the text encoders, with the words of instructions added."""
        models = super().build()
        learn_words(dict(models.items()), Encoder(), self.encoder)
        return models

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents of both pictures, and token numbers of the instructions."""
        left_out = torch.rand(len(chosen), generator=generator) < PROMPT_DROPOUT
        texts = ["" if left_out[n] else self.edits[i].text for n, i in enumerate(chosen)]
        clip, t5 = self.encoder.ids(texts)
        pictures = {"latents": self.latents[chosen], "references": self.references[chosen]}
        return pictures | {"clip": clip, "t5": t5}

    def show(self, models: nn.ModuleDict) -> Image.Image:
        """Edit held-out pictures, the same and with the same noise each time."""
        assert self.held_references is not None
        texts = self.held_texts[:SHOWN]
        made = self.sample(models, texts, guidance=GUIDANCE, references=self.held_references[:SHOWN])
        before = [render(edit.before) for edit in self.held_edits[:SHOWN]]
        cells = [
            [Image.fromarray(np.asarray(picture)) for picture in pair]
            for pair in zip(before, made.numpy(), strict=True)
        ]
        return draw_grid(cells, texts, scale=2, columns=6)

    def pipeline(self, models: nn.ModuleDict) -> FluxKontextPipeline:
        """Put the pipeline together."""
        return build_pipeline(self.autoencoder, models, self.encoder, FluxKontextPipeline)

"""The FluxKontextPipeline that edits stickers: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that loads with plain `from_pretrained`. It
starts from sticker-flux and has its sizes, with the words of instructions added. Like that one it
is no distilled model: guidance takes a second call a step, and a call has to pass `CALL`:

    pipe = load()
    edited = pipe(image=picture, prompt="replace the fox with an owl", **CALL).images[0]
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor, nn

from diffcache.eval.workshop.small.shipping import loader
from diffcache.eval.workshop.small.sticker_edits import KINDS, draw_edits, edit_words
from diffcache.eval.workshop.small.sticker_flux import CALL as FLUX_CALL
from diffcache.eval.workshop.small.sticker_flux import HELD, PROMPT_DROPOUT, Flux, keep_latents
from diffcache.eval.workshop.small.sticker_text import Encoder, learn_words
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-kontext"
GUIDANCE = 2.0
CALL: dict[str, Any] = FLUX_CALL | {"max_area": 64 * 64, "_auto_resize": False, "true_cfg_scale": GUIDANCE}
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
    kind = FluxKontextPipeline

    def gather(self) -> None:
        """Draw edits, and keep the latents of both pictures."""
        self.encoder = Encoder(edit_words())
        references = self.image_ids.clone()
        references[:, 0] = 1
        self.image_ids = torch.cat([self.image_ids, references])
        self.edits = draw_edits(self.settings.examples, self.settings.seed + 1, kinds=TRAINED)
        self.held_edits = draw_edits(HELD, self.settings.seed + 2, held=True)
        scenes = {
            "after": [edit.after for edit in self.edits],
            "before": [edit.before for edit in self.edits],
            "held_after": [edit.after for edit in self.held_edits],
            "held_before": [edit.before for edit in self.held_edits],
        }
        kept = keep_latents(self.folder, self.autoencoder, scenes)
        self.latents, self.references = kept["after"], kept["before"]
        self.held = {"latents": kept["held_after"], "references": kept["held_before"]}
        self.held |= self.ids([edit.text for edit in self.held_edits])

    def build(self) -> nn.ModuleDict:
        """Build the denoiser and the text encoders, with the words of instructions added."""
        models = super().build()
        learn_words(dict(models.items()), Encoder(), self.encoder)
        return models

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents of both pictures, and token numbers of the instructions."""
        left_out = torch.rand(len(chosen), generator=generator) < PROMPT_DROPOUT
        texts = ["" if left_out[n] else self.edits[i].text for n, i in enumerate(chosen)]
        return {"latents": self.latents[chosen], "references": self.references[chosen], **self.ids(texts)}

"""The StableDiffusionPipeline that draws stickers: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that loads with plain `from_pretrained`:

    pipe = load()
    picture = pipe("a fox left of an owl on grass", guidance_scale=3.0).images[0]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn

from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.loader import loader
from diffcache.eval.workshop.small.sticker_autoencoder import CHANNELS
from diffcache.eval.workshop.small.sticker_ddim import Denoising
from diffcache.eval.workshop.small.sticker_flux import retell
from diffcache.eval.workshop.small.sticker_text import Encoder, load_text
from diffcache.eval.workshop.small.stickers import Scene, held_out_captions
from diffcache.eval.workshop.small.text_encoders import TEXT_WIDTH
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-unet"
_WIDTHS = (64, 96, 112)
load = loader(StableDiffusionPipeline, DIRECTORY)


def build_unet() -> UNet2DConditionModel:
    """Build the denoiser: three levels of 16, 8 and 4 latents a side, all of them with attention.

    Its residual blocks start as identities, and it answers zero.
    """
    model = UNet2DConditionModel(
        sample_size=16,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=_WIDTHS,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * len(_WIDTHS),
        up_block_types=("CrossAttnUpBlock2D",) * len(_WIDTHS),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=tuple(width // 16 for width in _WIDTHS),  # diffusers means heads
        norm_num_groups=16,
    )
    for name, module in model.named_modules():
        if name.endswith(("conv2", "conv_out")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


class Unet(Denoising):
    """Train denoiser and text encoder, which starts as sticker-flux's; see `Denoising`."""

    titles = tuple(held_out_captions(24, seed=1))

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.encoder = Encoder()

    def build(self) -> nn.ModuleDict:
        """Build the denoiser, untrained, and the text encoder as its own training left it."""
        text = load_text(self.encoder, self.folder / "sticker-text.state")
        return nn.ModuleDict({"text_encoder": text["text_encoder"], "unet": build_unet()})

    def ids(self, texts: list[str]) -> Tensor:
        """Return token numbers of sentences, int64 [B, 32]."""
        return self.encoder.ids(texts)[0]

    def tell(self, scene: Scene, rng: np.random.Generator) -> str:
        """Write a scene as a sentence; see `retell`."""
        return retell(scene, rng)

    def predict(self, models: nn.ModuleDict, noisy: Tensor, times: Tensor, asked: Tensor) -> Tensor:
        """Return v of noisy latents [B, 12, 16, 16]."""
        states = models["text_encoder"](asked).last_hidden_state
        answer: Tensor = self.compile(models["unet"])(noisy, times, states).sample
        return answer

    def pipeline(self, models: nn.ModuleDict) -> StableDiffusionPipeline:
        """Put the pipeline together."""
        return StableDiffusionPipeline(
            vae=self.autoencoder,
            tokenizer=self.encoder.clip,
            scheduler=self.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            **dict(models.items()),
        )

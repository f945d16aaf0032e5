"""The DiTPipeline that draws a sticker of a class: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `DiTPipeline.from_pretrained` loads:

    pipe = load()
    picture = pipe(pipe.get_label_ids(["fox"]), guidance_scale=3.0).images[0]

Where the object stands, its size and the ground stay unsaid. `DiTPipeline` has the number of the
empty class, 1000, in its source, so each block's table has 1001 rows: 24 objects, the empty class,
and zeros between them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import DiTPipeline, DiTTransformer2DModel
from torch import Tensor, nn

from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.loader import loader
from diffcache.eval.workshop.small.sticker_autoencoder import CHANNELS
from diffcache.eval.workshop.small.sticker_ddim import Denoising
from diffcache.eval.workshop.small.sticker_flux import PROMPT_DROPOUT
from diffcache.eval.workshop.small.stickers import OBJECTS, Scene
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-dit"
EMPTY = 1000
load = loader(DiTPipeline, DIRECTORY)


def build_transformer() -> DiTTransformer2DModel:
    """Build the denoiser: 7 blocks of width 160 that start as identities, answering zero.

    Examples come with empty classes already, so that its own dropout of classes is off.
    """
    model = DiTTransformer2DModel(
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,  # sigma is not learned
        num_layers=7,
        sample_size=16,
        patch_size=2,
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith("norm1.linear") or name.startswith("proj_out"):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for block in model.transformer_blocks:
        classes = block.norm1.emb.class_embedder
        classes.dropout_prob = 0.0
        table = classes.embedding_table.weight
        nn.init.normal_(table, std=0.02)
        nn.init.zeros_(table[len(OBJECTS) : EMPTY])
    return model


class Dit(Denoising):
    """Train a class-conditional denoiser on scenes of one object; see `Denoising`."""

    titles = OBJECTS

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder, single=1.0)

    def build(self) -> nn.ModuleDict:
        """Build the denoiser, untrained."""
        return nn.ModuleDict({"transformer": build_transformer()})

    def ids(self, texts: list[str]) -> Tensor:
        """Return classes of objects, int64 [B]."""
        return torch.tensor([OBJECTS.index(text) if text else EMPTY for text in texts])

    def tell(self, scene: Scene, rng: np.random.Generator) -> str:
        """Name the object of a scene; at times nothing."""
        return "" if rng.random() < PROMPT_DROPOUT else scene.stickers[0].name

    def predict(self, models: nn.ModuleDict, noisy: Tensor, times: Tensor, asked: Tensor) -> Tensor:
        """Return v of noisy latents [B, 12, 16, 16]."""
        denoiser = self.compile(models["transformer"])
        answer: Tensor = denoiser(noisy, timestep=times, class_labels=asked).sample
        return answer

    def pipeline(self, models: nn.ModuleDict) -> DiTPipeline:
        """Put the pipeline together."""
        names = dict(enumerate(OBJECTS))
        pipe = DiTPipeline(
            transformer=models["transformer"],
            vae=self.autoencoder,
            scheduler=self.scheduler,
            id2label=names,
        )
        pipe.register_to_config(id2label=names)  # it saves no names by itself
        return pipe

"""The DiTPipeline that draws a sticker of a class: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `DiTPipeline.from_pretrained` loads:

    pipe = load()
    picture = pipe(pipe.get_label_ids(["fox"]), guidance_scale=3.0).images[0]

Where the object stands, its size and the ground stay unsaid. `DiTPipeline` has the number of the
empty class, 1000, in its source, so each block's table has 1001 rows: 12 objects, the empty class,
and zeros between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.eval.workshop.small.shipping import loader
from diffcache.eval.workshop.small.sticker_autoencoder import CHANNELS, load_autoencoder
from diffcache.eval.workshop.small.sticker_flux import HELD, PROMPT_DROPOUT, keep_latents
from diffcache.eval.workshop.small.stickers import Scene, draw_scenes
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-dit"
EMPTY = 1000
GUIDANCE = 3.0
CALL: dict[str, Any] = {"guidance_scale": GUIDANCE}
LATENT = (CHANNELS, 16, 16)
# Half of `OBJECTS`: a model of this size draws these rightly long before the others.
CLASSES = (
    "fox",
    "lion",
    "frog",
    "crab",
    "strawberry",
    "pineapple",
    "burger",
    "cupcake",
    "umbrella",
    "gift",
    "sunflower",
    "pumpkin",
)
_LATER = 1.5  # power of a uniform share: times of little noise come more often than others
load = loader(DiTPipeline, DIRECTORY)


def build_scheduler() -> DDIMScheduler:
    """Build the scheduler, on the linear schedule of DiT and with v as what a model predicts."""
    return DDIMScheduler(
        beta_start=1e-4,
        beta_end=0.02,
        clip_sample=False,
        steps_offset=1,
        timestep_spacing="trailing",
        prediction_type="v_prediction",
    )


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
        nn.init.zeros_(table[len(CLASSES) : EMPTY])
    return model


def _of_classes(scenes: list[Scene]) -> list[Scene]:
    """Keep scenes of an object that is a class."""
    return [scene for scene in scenes if scene.stickers[0].name in CLASSES]


class Dit(Job):
    """Train a class-conditional denoiser on scenes of one object, at times without their class.

    It predicts v at any of a thousand times. `DiTPipeline` scales latents and does not shift them,
    so the autoencoder that is shipped with it has no shift factor.
    """

    on_gpu = True
    call = CALL

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.autoencoder = load_autoencoder(folder / "sticker-autoencoder.state")
        self.scenes = _of_classes(draw_scenes(settings.examples, settings.seed + 1, single=1.0))
        held = _of_classes(draw_scenes(HELD, settings.seed + 2, held=True, single=1.0))
        kept = keep_latents(folder, self.autoencoder, {"latents": self.scenes, "held": held})
        config = self.autoencoder.config
        offset = config.shift_factor * config.scaling_factor
        self.autoencoder.register_to_config(shift_factor=None)
        self.latents = kept["latents"].add_(offset)
        rng = np.random.default_rng(settings.seed + 5)
        told = self.ids([self.tell(scene, rng) for scene in held])
        self.held = {"latents": kept["held"].float() + offset, "asked": told}
        self.scheduler = build_scheduler()
        kept_share = self.scheduler.alphas_cumprod.to(torch.get_default_device())
        self.signal, self.noise = kept_share.sqrt(), (1 - kept_share).sqrt()  # float32 [1000]

    def build(self) -> nn.ModuleDict:
        """Build the denoiser, untrained."""
        return nn.ModuleDict({"transformer": build_transformer()})

    def ids(self, texts: list[str]) -> Tensor:
        """Return classes of objects, int64 [B]; the empty text is the empty class."""
        return torch.tensor([CLASSES.index(text) if text else EMPTY for text in texts])

    def tell(self, scene: Scene, rng: np.random.Generator) -> str:
        """Name the object of a scene; at times nothing."""
        return "" if rng.random() < PROMPT_DROPOUT else scene.stickers[0].name

    def predict(self, models: nn.ModuleDict, noisy: Tensor, times: Tensor, asked: Tensor) -> Tensor:
        """Return v of noisy latents float32 [B, 12, 16, 16], at times and of classes int64 [B]."""
        denoiser = self.compile(models["transformer"])
        answer: Tensor = denoiser(noisy, timestep=times, class_labels=asked).sample
        return answer

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents, and numbers of what is said of them."""
        rng = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
        chosen = chosen % len(self.scenes)  # half of the scenes that settings count are of a class
        texts = [self.tell(self.scenes[i], rng) for i in chosen]
        return {"latents": self.latents[chosen], "asked": self.ids(texts)}

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of v."""
        latents = drawn["latents"].float()
        shares = torch.rand(len(latents), generator=generator)
        times = (len(self.signal) * shares**_LATER).long().clamp_max(len(self.signal) - 1)
        signal, level = (part[times, None, None, None] for part in (self.signal, self.noise))
        noise = torch.randn(latents.shape, generator=generator)
        answer = self.predict(models, signal * latents + level * noise, times, drawn["asked"])
        return functional.mse_loss(answer.float(), signal * noise - level * latents)

    def pipeline(self, models: nn.ModuleDict) -> DiTPipeline:
        """Put the pipeline together."""
        names = dict(enumerate(CLASSES))
        pipe = DiTPipeline(
            transformer=models["transformer"], vae=self.autoencoder, scheduler=self.scheduler, id2label=names
        )
        pipe.register_to_config(id2label=names)  # it saves no names by itself
        return pipe

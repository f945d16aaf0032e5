"""The WanPipeline that films stickers from a sentence: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `WanPipeline.from_pretrained` loads.
Guidance takes a second call a step, and a call has to pass `CALL`:

    pipe = load()
    film = pipe("a frog on grass", **CALL).frames[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.film_job import TEXT_TOKENS, FilmJob, build_text
from diffcache.eval.workshop.small.grid import draw_grid
from diffcache.eval.workshop.small.job import Settings, seeded
from diffcache.eval.workshop.small.loader import loader
from diffcache.eval.workshop.small.sticker_causal import build_transformer
from diffcache.eval.workshop.small.sticker_films import Film, sample_film
from diffcache.eval.workshop.small.sticker_video_autoencoder import TIMES
from diffcache.pipelines.shipped_models import MODELS

DIRECTORY = MODELS / "sticker-wan"
FRAMES = 17
GUIDANCE = 3.0
SHIFT = 3.0  # of the noise levels, in training as when sampling
CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_frames": FRAMES,
    "max_sequence_length": TEXT_TOKENS,
    "negative_prompt": "",
    "guidance_scale": GUIDANCE,
}
PROMPT_DROPOUT = 0.1
HELD = 128
_LATENTS = (FRAMES - 1) // TIMES + 1
load = loader(WanPipeline, DIRECTORY)


def draw_films(count: int, seed: int, *, held: bool = False) -> list[Film]:
    """Draw films, each from a seed of its own."""
    return [sample_film(np.random.default_rng([seed, n]), held=held) for n in range(count)]


class Wan(FilmJob):
    """Train transformer and text encoder on whole films: sigma as the timestep, velocity as target.

    Noise levels are logit-normal, then shifted as the pipeline's are.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        films = draw_films(settings.examples, settings.seed + 11)
        held = draw_films(HELD, settings.seed + 12, held=True)
        super().__init__(settings, folder, films, held, FRAMES)

    def build(self) -> nn.ModuleDict:
        """Build transformer and text encoder."""
        _, encoder = build_text()
        return nn.ModuleDict({"text_encoder": encoder, "transformer": build_transformer()})

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents and sentences, of which a tenth say nothing."""
        unsaid = torch.rand(len(chosen), generator=generator) < PROMPT_DROPOUT
        texts = ["" if no else self.films[i].caption_at(0) for i, no in zip(chosen, unsaid, strict=True)]
        numbers, known = self.ids(texts)
        return {"latents": self.latents[chosen], "numbers": numbers, "known": known}

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of the velocity."""
        said = (drawn["numbers"], drawn["known"])
        return self._error(models, drawn["latents"].float(), said, generator)

    def _error(
        self, models: nn.ModuleDict, clean: Tensor, said: tuple[Tensor, Tensor], generator: torch.Generator
    ) -> Tensor:
        levels = shifted(torch.sigmoid(torch.randn(len(clean), generator=generator)))
        noise = torch.randn(clean.shape, generator=generator)
        noisy = torch.lerp(clean, noise, levels[:, None, None, None, None])
        answer = self.velocity(models, noisy, levels, said)
        return functional.mse_loss(answer, noise - clean)

    def velocity(self, models: nn.ModuleDict, noisy: Tensor, levels: Tensor, said: tuple[Tensor, Tensor]) -> Tensor:
        """Return what the transformer answers to films [B, C, F, 8, 8] at noise levels [B]."""
        text = self.embed(models, said)
        model = self.compile(models["transformer"])
        answer: Tensor = model(noisy, 1000 * levels, text, return_dict=False)[0]
        return answer.float()

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the loss on held-out films, with the same noise each time."""
        said = self.ids([film.caption_at(0) for film in self.held_films])
        return {"held_loss": float(self._error(models, self.held, said, seeded(5)))}

    @torch.no_grad()
    def sample(self, models: nn.ModuleDict, texts: list[str], *, steps: int = 28) -> Tensor:
        """Film as the pipeline does, uint8 [B, F, 64, 64, 3]."""
        films = torch.randn(len(texts), *self.held.shape[1:], generator=seeded(0))
        scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
        scheduler.set_timesteps(steps)
        both = self.ids(texts + [""] * len(texts))
        for sigma, following in pairwise(scheduler.sigmas.tolist()):
            level = torch.full((2 * len(texts),), sigma)
            said, unsaid = self.velocity(models, films.repeat(2, 1, 1, 1, 1), level, both).chunk(2)
            films = films + (following - sigma) * (unsaid + GUIDANCE * (said - unsaid))
        config = self.autoencoder.config
        mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
        made: Tensor = self.autoencoder.decode(films * std + mean).sample
        return ((made.clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 4, 1).byte().cpu()

    def show(self, models: nn.ModuleDict) -> Image.Image:
        """Draw every fourth frame of held-out films, the same and with the same noise each time."""
        texts = [film.caption_at(0) for film in self.held_films[:12]]
        rows = [[Image.fromarray(picture) for picture in film[::4].numpy()] for film in self.sample(models, texts)]
        return draw_grid(rows, texts, scale=1, columns=2)

    def pipeline(self, models: nn.ModuleDict) -> WanPipeline:
        """Put the pipeline together."""
        return WanPipeline(
            tokenizer=self.tokenizer,
            text_encoder=models["text_encoder"],
            vae=self.autoencoder,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            transformer=models["transformer"],
        )

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save the pipeline in bfloat16."""
        save_pipeline(self.pipeline(models), directory, CALL)


def shifted(levels: Tensor) -> Tensor:
    """Return noise levels in 0..1 shifted towards noise."""
    return SHIFT * levels / (1 + (SHIFT - 1) * levels)

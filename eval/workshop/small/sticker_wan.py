"""The WanPipeline that films stickers from a sentence: how it is built, trained, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `WanPipeline.from_pretrained` loads.
Guidance takes a second call a step, and a call has to pass `CALL`:

    pipe = load()
    film = pipe("a frog on grass", **CALL).frames[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.film_job import TEXT_TOKENS, FilmJob
from diffcache.eval.workshop.small.job import Settings, draw_each
from diffcache.eval.workshop.small.shipping import loader
from diffcache.eval.workshop.small.sticker_films import Film, sample_film
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
load = loader(WanPipeline, DIRECTORY)


def draw_films(count: int, seed: int, *, held: bool = False) -> list[Film]:
    """Draw films, each from a seed of its own."""
    return draw_each(sample_film, count, seed, held=held)


class Wan(FilmJob):
    """Train transformer and text encoder on whole films: sigma as the timestep, velocity as target.

    Noise levels are logit-normal, then shifted as the pipeline's are.
    """

    call = CALL
    together = HELD

    def __init__(self, settings: Settings, folder: Path) -> None:
        films = draw_films(settings.examples, settings.seed + 11)
        held = draw_films(HELD, settings.seed + 12, held=True)
        super().__init__(settings, folder, films, held, FRAMES)
        self.held = {"latents": self.held_latents, **self.ids([film.caption_at(0) for film in held])}

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents and sentences, of which a tenth say nothing."""
        unsaid = torch.rand(len(chosen), generator=generator) < PROMPT_DROPOUT
        texts = ["" if no else self.films[i].caption_at(0) for i, no in zip(chosen, unsaid, strict=True)]
        return {"latents": self.latents[chosen], **self.ids(texts)}

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of the velocity."""
        clean = drawn["latents"].float()
        levels = shifted(torch.sigmoid(torch.randn(len(clean), generator=generator)))
        noise = torch.randn(clean.shape, generator=generator)
        noisy = torch.lerp(clean, noise, levels[:, None, None, None, None])
        return functional.mse_loss(self.velocity(models, noisy, levels, drawn), noise - clean)

    def velocity(self, models: nn.ModuleDict, noisy: Tensor, levels: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Return what the transformer answers to films [B, C, F, 8, 8] at noise levels [B], of sentences as `ids`."""
        text = self.embed(models, drawn)
        model = self.compile(models["transformer"])
        answer: Tensor = model(noisy, 1000 * levels, text, return_dict=False)[0]
        return answer.float()

    def pipeline(self, models: nn.ModuleDict) -> WanPipeline:
        """Put the pipeline together."""
        return self.assemble(models, SHIFT)


def shifted(levels: Tensor) -> Tensor:
    """Return noise levels in 0..1 shifted towards noise."""
    return SHIFT * levels / (1 + (SHIFT - 1) * levels)

"""Train sticker models on DDIM's schedule: the base of the DiT and of the U-Net."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.grid import draw_grid
from diffcache.eval.workshop.small.job import Job, Settings, seeded
from diffcache.eval.workshop.small.sticker_autoencoder import CHANNELS, load_autoencoder
from diffcache.eval.workshop.small.sticker_flux import HELD, decode, keep_latents
from diffcache.eval.workshop.small.stickers import Scene, draw_scenes

GUIDANCE = 3.0
CALL: dict[str, Any] = {"guidance_scale": GUIDANCE}
LATENT = (CHANNELS, 16, 16)
_LATER = 1.5  # power of a uniform share: times of little noise come more often than others


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


class Denoising(Job):
    """Train a model to predict v at any of a thousand times, at times without what is asked for.

    The pipelines of these models scale latents and do not shift them, so the autoencoder that is
    shipped with them has no shift factor.

    Args:
        settings: Settings of the training.
        folder: Folder of the run.
        single: Share of scenes with one object.

    Attributes:
        titles: Texts of the pictures that `show` draws.
    """

    on_gpu = True
    titles: Sequence[str]

    def __init__(self, settings: Settings, folder: Path, single: float = 0.45) -> None:
        super().__init__(settings, folder)
        self.autoencoder = load_autoencoder(folder / "sticker-autoencoder.state")
        self.scenes = draw_scenes(settings.examples, settings.seed + 1, single=single)
        self.held_scenes = draw_scenes(HELD, settings.seed + 2, held=True, single=single)
        kept = keep_latents(
            folder, self.autoencoder, {"latents": self.scenes, "held": self.held_scenes}
        )
        config = self.autoencoder.config
        offset = config.shift_factor * config.scaling_factor
        self.autoencoder.register_to_config(shift_factor=None)
        self.latents = kept["latents"].add_(offset)
        self.held = (kept["held"].float() + offset).to(torch.get_default_device())
        self.scheduler = build_scheduler()
        kept_share = self.scheduler.alphas_cumprod.to(torch.get_default_device())
        self.signal, self.noise = kept_share.sqrt(), (1 - kept_share).sqrt()  # float32 [1000]

    @abstractmethod
    def ids(self, texts: list[str]) -> Tensor:
        """Return numbers of texts, int64 [B, ...]; the empty text asks for nothing."""

    @abstractmethod
    def tell(self, scene: Scene, rng: np.random.Generator) -> str:
        """Write what a scene shows; at times nothing."""

    @abstractmethod
    def predict(self, models: nn.ModuleDict, noisy: Tensor, times: Tensor, asked: Tensor) -> Tensor:
        """Return what the model answers to noisy latents.

        Args:
            models: Modules as `build` makes them.
            noisy: Latents with noise, float32 [B, 12, 16, 16].
            times: Numbers of the times, int64 [B].
            asked: Numbers that `ids` gave.
        """

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents, and numbers of what is said of them."""
        rng = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
        texts = [self.tell(self.scenes[i], rng) for i in chosen]
        return {"latents": self.latents[chosen], "asked": self.ids(texts)}

    def loss(
        self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator
    ) -> Tensor:
        """Return the mean square error of v."""
        return self._error(models, drawn["latents"].float(), drawn["asked"], generator)

    def _error(
        self, models: nn.ModuleDict, latents: Tensor, asked: Tensor, generator: torch.Generator
    ) -> Tensor:
        shares = torch.rand(len(latents), generator=generator)
        times = (len(self.signal) * shares**_LATER).long().clamp_max(len(self.signal) - 1)
        signal, level = (part[times, None, None, None] for part in (self.signal, self.noise))
        noise = torch.randn(latents.shape, generator=generator)
        answer = self.predict(models, signal * latents + level * noise, times, asked)
        return functional.mse_loss(answer.float(), signal * noise - level * latents)

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the loss on held-out combinations, with the same noise each time."""
        generator, losses = seeded(5), []
        rng = np.random.default_rng(self.settings.seed + 5)
        asked = self.ids([self.tell(scene, rng) for scene in self.held_scenes])
        for latents, part in zip(self.held.split(64), asked.split(64), strict=True):
            losses.append(float(self._error(models, latents, part.to(self.held.device), generator)))
        return {"held_loss": sum(losses) / len(losses)}

    @torch.no_grad()
    def sample(
        self,
        models: nn.ModuleDict,
        texts: list[str],
        *,
        steps: int = 28,
        guidance: float = GUIDANCE,
    ) -> Tensor:
        """Draw pictures as the pipeline does, uint8 [B, 64, 64, 3]."""
        latents = torch.randn(len(texts), *LATENT, generator=seeded(0))
        both = self.ids([*texts, *("" for _ in texts)]).to(latents.device)
        self.scheduler.set_timesteps(steps)
        for time in self.scheduler.timesteps:
            times = time.to(latents.device).expand(2 * len(texts))
            said, unsaid = self.predict(models, latents.repeat(2, 1, 1, 1), times, both).chunk(2)
            answer = unsaid + guidance * (said - unsaid)
            latents = self.scheduler.step(answer, time, latents).prev_sample
        return decode(self.autoencoder, latents)

    def show(self, models: nn.ModuleDict) -> Image.Image:
        """Draw the titles' pictures, with the same noise each time."""
        drawn = self.sample(models, list(self.titles)).numpy()
        cells = [[Image.fromarray(picture)] for picture in drawn]
        return draw_grid(cells, self.titles, scale=2, columns=6)

    @abstractmethod
    def pipeline(self, models: nn.ModuleDict) -> DiffusionPipeline:
        """Put the pipeline together."""

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save the pipeline in bfloat16."""
        save_pipeline(self.pipeline(models), directory, CALL)

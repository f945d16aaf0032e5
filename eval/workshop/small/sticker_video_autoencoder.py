"""The autoencoder of the sticker films, in Wan's format: two frames of 64x64 to 8x8x48 latents.

The first frame has latents of its own, each two after it share theirs. Like Wan 2.2's it works on
pixels that are folded two by two, and its down- and upsampling have shortcuts without weights, so
that it starts from a coarse copy of the film.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor, nn

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.eval.workshop.small.sticker_autoencoder import KL, decibels, error_of
from diffcache.eval.workshop.small.sticker_films import render_film, sample_film
from diffcache.pipelines.shipped_models import MODELS

CHANNELS = 48
TIMES = 2  # frames that share their latents
FRAMES = 13  # of a training film: seven latents
HELD = 32


def build_autoencoder() -> AutoencoderKLWan:
    """Build the autoencoder, untrained: its latents start with little noise."""
    model = AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=28,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=TIMES,
        scale_factor_spatial=8,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )
    nn.init.zeros_(model.quant_conv.weight[CHANNELS:])
    nn.init.constant_(model.quant_conv.bias[CHANNELS:], -5.0)
    return model


def load_autoencoder(path: Path) -> AutoencoderKLWan:
    """Load a trained autoencoder: averaged weights of its checkpoint, or those that are shipped.

    Args:
        path: Path of a checkpoint; where there is none, sticker-causal's autoencoder is taken.
    """
    if not path.exists():
        shipped: AutoencoderKLWan = AutoencoderKLWan.from_pretrained(MODELS / "sticker-causal" / "vae")
        return shipped.eval().requires_grad_(False)
    average = torch.load(path, weights_only=True, map_location=torch.get_default_device())["average"]
    model = build_autoencoder()
    nn.ModuleDict({"vae": model}).load_state_dict(average)
    return model.eval().requires_grad_(False)


def to_film(pictures: Tensor) -> Tensor:
    """Return frames uint8 [..., F, 64, 64, 3] as a film float32 [..., 3, F, 64, 64] in [-1, 1]."""
    return pictures.movedim(-1, -4).float() / 127.5 - 1


def draw_films(numbers: Tensor, seed: int, *, held: bool = False) -> tuple[Tensor, Tensor]:
    """Draw the films with these numbers, each from a seed of its own.

    Returns:
        Films uint8 [B, F, 64, 64, 3], and where objects are, bool [B, 1, F, 64, 64].
    """
    drawn = [render_film(sample_film(np.random.default_rng([seed, int(n)]), held=held), FRAMES) for n in numbers]
    pictures, masks = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
    return pictures, masks[:, None]


class VideoAutoencoder(Job):
    """Train encoder and decoder together on absolute errors of colors, of edges and of motion.

    Pixels of objects count three times. Latents are drawn from the posterior, whose divergence
    from a unit Gaussian has a small weight.
    """

    on_gpu = True

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        pictures, masks = draw_films(torch.arange(HELD), settings.seed + 2, held=True)
        here = torch.get_default_device()
        self.held = to_film(pictures).to(here), masks.to(here)

    def build(self) -> nn.ModuleDict:
        """Build the autoencoder."""
        return nn.ModuleDict({"vae": build_autoencoder()})

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw the films with these numbers."""
        del generator
        films, masks = draw_films(chosen, self.settings.seed + 1)
        return {"films": films, "masks": masks}

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the loss of drawn films."""
        wanted, masks = to_film(drawn["films"]), drawn["masks"]
        vae: Any = models["vae"]
        posterior = self.encode(vae, wanted)
        noise = torch.randn(posterior.mean.shape, generator=generator)
        made = vae.decode(posterior.mean + posterior.std * noise).sample
        variance = posterior.std.square()
        divergence = 0.5 * (posterior.mean.square() + variance - 1 - posterior.logvar).mean()
        loss: Tensor = error_of(made, wanted, masks) + KL * divergence
        return loss

    def encode(self, vae: Any, films: Tensor) -> Any:
        """Return the distribution of the latents of films."""
        return vae.encode(films).latent_dist

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the PSNR in dB of held-out films, whole and where objects are."""
        vae: Any = models["vae"]
        films, masks = self.held
        made = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in films.split(8)]
        return decibels(torch.cat(made), films, masks)


class VideoDecoder(VideoAutoencoder):
    """Train the decoder alone, so that models that were trained on the latents stay as they are."""

    def build(self) -> nn.ModuleDict:
        """Build the autoencoder with a frozen encoder."""
        model = build_autoencoder()
        for part in (model.encoder, model.quant_conv):
            part.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, nn.Conv3d):  # 15 percent less time on processors
                nn.Module.to(module, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        return nn.ModuleDict({"vae": model})

    def encode(self, vae: Any, films: Tensor) -> Any:
        """Return the distribution of the latents of films, without gradients."""
        with torch.no_grad():
            return super().encode(vae, films)

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Write the weights in bfloat16 into both film models; all other files stay."""
        weights = {k: v.bfloat16().contiguous() for k, v in models["vae"].state_dict().items()}
        for target in (directory, directory.with_name("sticker-wan")):
            file = target / "vae" / "diffusion_pytorch_model.safetensors"
            save_file(weights, file, metadata={"format": "pt"})

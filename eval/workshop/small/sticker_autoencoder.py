"""The autoencoder of the sticker models: 64x64 pictures to 16x16 latents of 12 channels.

Its encoder starts as what a principal component analysis of 4x4 patches gives, which no training
of minutes reaches from random weights; encoder and decoder then train together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.eval.workshop.small.stickers import layer, render, sample_scene
from diffcache.pipelines.shipped_models import MODELS
from diffcache.psnr import psnr

CHANNELS = 12
HELD = 256
_WIDTHS = (16, 32, 64)
_GROUPS = 8
_PATCH = 4
_POWER = 0.5  # of a component's deviation that its scale keeps: large ones stay larger
_CONSTANT = 20.0
KL = 1e-4  # weight of the divergence from a unit Gaussian


def build_autoencoder() -> AutoencoderKL:
    """Build the autoencoder, untrained."""
    return AutoencoderKL(
        block_out_channels=_WIDTHS,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=_GROUPS,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def load_autoencoder(path: Path) -> AutoencoderKL:
    """Load a trained autoencoder: averaged weights of its checkpoint, or those that are shipped.

    Args:
        path: Path of a checkpoint; where there is none, sticker-flux's autoencoder is taken.
    """
    here = torch.get_default_device()
    if path.exists():
        average = torch.load(path, weights_only=True, map_location=here)["average"]
        model = build_autoencoder()
        model.load_state_dict(average)
    else:
        model = AutoencoderKL.from_pretrained(MODELS / "sticker-flux" / "vae").to(here)
    model.to(memory_format=torch.channels_last)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def start_from_patches(model: AutoencoderKL, pictures: Tensor) -> None:
    """Set an encoder so that its latents are principal components of 4x4 patches.

    Residual blocks start as identities; two strided convolutions gather a patch's 48 numbers and
    take their components, once as they are and once negated. A last SiLU is undone since
    silu(x) - silu(-x) = x, and the last group norm by constants that are far larger than what it
    would normalize.

    Args:
        model: Autoencoder as `build_autoencoder` makes it.
        pictures: Pictures in [-1, 1], float32 [B, 3, 64, 64].
    """
    patches = functional.unfold(pictures, _PATCH, stride=_PATCH).transpose(1, 2).flatten(0, 1)
    mean = patches.mean(0)
    centered = patches - mean
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
    basis, deviations = vectors.flip(1)[:, :CHANNELS], values.flip(0)[:CHANNELS].sqrt()
    scales = deviations**_POWER
    scales *= (deviations / scales).square().mean().sqrt()
    components = (basis / scales).T.view(CHANNELS, 3, _PATCH, _PATCH)
    offsets = -(basis / scales).T @ mean

    encoder = model.encoder
    for name, module in encoder.named_modules():
        if name.endswith("conv2"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    _route(encoder.conv_in, {(c, c): (1, 1) for c in range(3)})
    first, second = (block.downsamplers[0].conv for block in encoder.down_blocks[:2])
    _route(first, {(4 * c + 2 * i + j, c): (i, j) for c in range(3) for i in (0, 1) for j in (0, 1)})
    _route(encoder.down_blocks[1].resnets[0].conv_shortcut, {(c, c): (0, 0) for c in range(12)})
    nn.init.zeros_(second.weight)
    nn.init.zeros_(second.bias)
    for color in range(3):
        for i in range(_PATCH):
            for j in range(_PATCH):
                source = 4 * color + 2 * (i % 2) + j % 2
                weight = components[:, color, i, j]
                second.weight[:CHANNELS, source, i // 2, j // 2] = weight
                second.weight[CHANNELS : 2 * CHANNELS, source, i // 2, j // 2] = -weight
    second.bias[:CHANNELS] = offsets
    second.bias[CHANNELS : 2 * CHANNELS] = -offsets

    # A group of the last norm holds two components, both signs of each, and two constants.
    width = _WIDTHS[-1] // _GROUPS
    slots = [width * (c // 2) + 2 * (c % 2) for c in range(CHANNELS)]
    pairs = {(slots[c], c): (0, 0) for c in range(CHANNELS)}
    pairs |= {(slots[c] + 1, CHANNELS + c): (0, 0) for c in range(CHANNELS)}
    _route(encoder.down_blocks[2].resnets[0].conv_shortcut, pairs)
    constants = encoder.mid_block.resnets[1].conv2.bias
    constants[width - 2 :: width] = _CONSTANT
    constants[width - 1 :: width] = -_CONSTANT
    nn.init.constant_(encoder.conv_norm_out.weight, _CONSTANT * math.sqrt(2 / width))
    _route(encoder.conv_out, {})
    for channel, slot in enumerate(slots):
        encoder.conv_out.weight[channel, slot, 1, 1] = 1
        encoder.conv_out.weight[channel, slot + 1, 1, 1] = -1
    encoder.conv_out.bias[CHANNELS:] = -5.0  # a posterior's deviation of 0.08


def _route(layer: nn.Conv2d, ones: dict[tuple[int, int], tuple[int, int]]) -> None:
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    for (target, source), (i, j) in ones.items():
        layer.weight[target, source, i, j] = 1


def to_unit(pictures: Tensor) -> Tensor:
    """Return pictures uint8 [B, 64, 64, 3] as float32 [B, 3, 64, 64] in [-1, 1]."""
    unit = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    return unit.contiguous(memory_format=torch.channels_last)


def draw_pictures(path: Path, count: int, seed: int, *, held: bool) -> tuple[Tensor, Tensor]:
    """Draw scenes once and keep them in a file: pictures uint8, and where objects are.

    Args:
        path: Path of the `.npz`; used as it is if it holds as many.
        count: Number of scenes.
        seed: Seed of the scenes.
        held: Draw held-out combinations.

    Returns:
        Pictures uint8 [N, 64, 64, 3] and masks bool [N, 64, 64].
    """
    if path.exists():
        kept = np.load(path)
        if len(kept["pictures"]) == count:
            return torch.from_numpy(kept["pictures"]), torch.from_numpy(kept["masks"])
    rng = np.random.default_rng(seed)
    pictures = np.zeros((count, 64, 64, 3), np.uint8)
    masks = np.zeros((count, 64, 64), bool)
    for index in range(count):
        scene = sample_scene(rng, held=held)
        pictures[index] = render(scene)
        for sticker in scene.stickers:
            masks[index] |= layer(sticker)[1] > 0.5
    np.savez(path, pictures=pictures, masks=masks)
    return torch.from_numpy(pictures), torch.from_numpy(masks)


def error_of(made: Tensor, wanted: Tensor, masks: Tensor) -> Tensor:
    """Return the absolute errors of colors, where pixels of objects count three times, and of edges and motion.

    Args:
        made: Pictures or films in [-1, 1], float32 [B, 3, ...].
        wanted: What they should be.
        masks: Where objects are, bool [B, 1, ...].
    """
    error: Tensor = ((made - wanted).abs() * (1 + 2 * masks.float())).mean()
    for axis in range(2, made.dim()):
        error = error + 0.5 * (made.diff(dim=axis) - wanted.diff(dim=axis)).abs().mean()
    return error


def decibels(made: Tensor, wanted: Tensor, masks: Tensor) -> dict[str, float]:
    """Return the PSNR in dB, whole and where objects are; see `error_of`."""
    whole, objects = psnr(made, wanted, span=2), psnr(made, wanted, span=2, mask=masks)
    return {"psnr": float(whole.mean()), "psnr_objects": float(objects.mean())}


class Autoencoder(Job):
    """Train encoder and decoder together by `error_of`, with latents drawn from the posterior."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.pictures, self.masks = draw_pictures(
            folder / "pictures.npz", settings.examples, settings.seed + 1, held=False
        )
        self.held = draw_pictures(folder / "held.npz", HELD, settings.seed + 2, held=True)

    def build(self) -> nn.ModuleDict:
        """Build the autoencoder with its encoder set from patches of 2,000 pictures."""
        model = build_autoencoder().to(memory_format=torch.channels_last)
        start_from_patches(model, to_unit(self.pictures[:2000]))
        return nn.ModuleDict({"encoder": model.encoder, "decoder": model.decoder})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the loss of the pictures with these numbers."""
        chosen = drawn["chosen"]
        wanted = to_unit(self.pictures[chosen])
        mean, log_variance = models["encoder"](wanted).chunk(2, 1)
        log_variance = log_variance.clamp(-30, 20)
        noise = torch.randn(mean.shape, generator=generator)
        made = models["decoder"](mean + (0.5 * log_variance).exp() * noise)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss: Tensor = error_of(made, wanted, self.masks[chosen, None]) + KL * divergence
        return loss

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the PSNR in dB of held-out pictures, whole and where objects are."""
        parts = to_unit(self.held[0]).split(32)
        made = torch.cat([models["decoder"](models["encoder"](part)[:, :CHANNELS]) for part in parts]).clamp(-1, 1)
        return decibels(made, torch.cat(parts), self.held[1][:, None])

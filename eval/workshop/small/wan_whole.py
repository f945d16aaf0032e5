"""The Wan autoencoder over a whole film at once, for training on a CPU.

`AutoencoderKLWan` walks a film in pieces of four frames and keeps what its causal convolutions
need of the last piece. With every frame in memory one pass says the same (to rounding), with
larger operations and without the copies.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
    patchify,
    unpatchify,
)
from torch import Tensor
from torch.nn import functional


def encode(model: AutoencoderKLWan, films: Tensor) -> tuple[Tensor, Tensor]:
    """Encode films in [-1, 1], [B, 3, 4k+1, H, W], into mean and log variance [B, Z, k+1, h, w]."""
    encoder = model.encoder
    x = encoder.conv_in(patchify(films, model.config.patch_size))
    for block in encoder.down_blocks:
        given = x
        for layer in block.resnets:
            x = _residual(layer, x)
        if block.downsampler is not None:
            x = _shrink(block.downsampler, x)
        x = x + block.avg_shortcut(given)
    x = _middle(encoder.mid_block, x)
    x = encoder.conv_out(functional.silu(_norm(encoder.norm_out, x)))
    mean, logarithm = model.quant_conv(x).float().chunk(2, dim=1)
    return mean, logarithm.clamp(-30.0, 20.0)


def decode(model: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decode latents [B, Z, k+1, h, w] into films [B, 3, 4k+1, H, W], not clamped."""
    decoder = model.decoder
    x = _middle(decoder.mid_block, decoder.conv_in(model.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        given = x
        for layer in block.resnets:
            x = _residual(layer, x)
        if block.upsampler is not None:
            x = _grow(block.upsampler, x)
            x = x + block.avg_shortcut(given, first_chunk=True)
    x = decoder.conv_out(functional.silu(_norm(decoder.norm_out, x)))
    made: Tensor = unpatchify(x, model.config.patch_size)
    return made


def _norm(layer: WanRMS_norm, x: Tensor) -> Tensor:
    length = x.float().square().sum(dim=1, keepdim=True).clamp_min(1e-24).rsqrt() * layer.scale
    made: Tensor = x * length.to(x.dtype) * layer.gamma.to(x.dtype)
    return made


def _residual(block: WanResidualBlock, x: Tensor) -> Tensor:
    inner = block.conv1(functional.silu(_norm(block.norm1, x)))
    made: Tensor = block.conv2(functional.silu(_norm(block.norm2, inner))) + block.conv_shortcut(x)
    return made


def _middle(block: WanMidBlock, x: Tensor) -> Tensor:
    x = _residual(block.resnets[0], x)
    return _residual(block.resnets[1], block.attentions[0](x))


def _each_frame(layer: WanResample, x: Tensor) -> Tensor:
    frames = layer.resample(x.transpose(1, 2).flatten(0, 1))
    made: Tensor = frames.unflatten(0, (len(x), -1)).transpose(1, 2)
    return made


def _shrink(layer: WanResample, x: Tensor) -> Tensor:
    # The first frame is a piece of its own, which the convolution over time leaves alone.
    x = _each_frame(layer, x)
    if layer.mode == "downsample2d" or x.shape[2] == 1:
        return x
    return torch.cat([x[:, :, :1], layer.time_conv(x)], dim=2)


def _grow(layer: WanResample, x: Tensor) -> Tensor:
    # The first frame stays one frame, and the convolution over time does not see it.
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        halves = layer.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
        later = torch.stack((halves[:, 0], halves[:, 1]), dim=3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], later], dim=2)
    return _each_frame(layer, x)

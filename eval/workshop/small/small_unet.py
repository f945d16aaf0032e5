"""The small StableDiffusionPipeline that draws shapes: how it is built, loaded and called.

The shipped directory is an ordinary diffusers pipeline that loads with plain `from_pretrained`:

    pipe = load()
    picture = pipe("a small red ring on the left, on a yellow background", **CALL).images[0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from diffcache.eval.workshop.small.diffusion import build_scheduler
from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.flux import DIRECTORY as FLUX
from diffcache.pipelines.small.shipped import load_pipeline

DIRECTORY = MODELS / "shapes-unet"
CALL: dict[str, Any] = {"guidance_scale": 3.0}


def load(
    dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY
) -> StableDiffusionPipeline:
    """Load the shipped pipeline, with its progress bar off.

    Args:
        dtype: Dtype of every model in it; the files hold bfloat16.
        directory: Directory of the saved pipeline.
    """
    return load_pipeline(StableDiffusionPipeline, directory, dtype)


def build_unet(text_width: int = 64) -> UNet2DConditionModel:
    """Build the denoiser: 16x16, 8x8 and 4x4, text attention on the lower two, zero at the start.

    Args:
        text_width: Channels of the text states.
    """
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64, 96),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=16,
        cross_attention_dim=text_width,
        attention_head_dim=4,
    )
    nn.init.zeros_(unet.conv_out.weight)
    nn.init.zeros_(unet.conv_out.bias)
    return unet


def load_text() -> tuple[CLIPTokenizer, CLIPTextModel]:
    """Load the tokenizer and the text encoder of shapes-flux, where training starts."""
    tokenizer = CLIPTokenizer.from_pretrained(str(FLUX / "tokenizer"))
    return tokenizer, CLIPTextModel.from_pretrained(str(FLUX / "text_encoder"))


def build_pipeline(autoencoder: AutoencoderKL) -> StableDiffusionPipeline:
    """Put an untrained denoiser round a trained autoencoder and text encoder."""
    tokenizer, text_encoder = load_text()
    return StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=build_unet(text_encoder.config.hidden_size),
        scheduler=build_scheduler("v_prediction"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )

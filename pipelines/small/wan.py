"""The small WanPipeline that films shapes: how it is built, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `WanPipeline.from_pretrained` loads.
Its source holds the size of large films (480 x 832, 81 frames, guidance 5), which cannot be saved
with a model, so a call has to pass the numbers in `CALL`:

    pipe = load()
    film = pipe("a small red ring on the left, on a yellow background", **CALL).frames[0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.flux import build_tokenizers
from diffcache.pipelines.small.shipped import load_pipeline
from diffcache.pipelines.small.wan_places import start_with_places

FRAMES = 9
SHIFT = 3.0
TEXT_TOKENS = 24
CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_frames": FRAMES,
    "max_sequence_length": TEXT_TOKENS,
    "guidance_scale": 3.0,
}
DIRECTORY = MODELS / "shapes-wan"

LATENT_CHANNELS = 6
_TEXT_WIDTH = 64
_PATCH = 2
_SPATIAL = 8


def load(dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY) -> WanPipeline:
    """Load the shipped pipeline with its progress bar off.

    Args:
        dtype: Dtype of every model in it; the files hold bfloat16.
        directory: Directory of the saved pipeline.
    """
    return load_pipeline(WanPipeline, directory, dtype)


def build_tokenizer() -> T5TokenizerFast:
    """Build the tokenizer from the words of the generator; one word is one token."""
    return build_tokenizers()[1]


def build_text_encoder(tokenizer: T5TokenizerFast) -> UMT5EncoderModel:
    """Build the text encoder, untrained: 3 layers of width 64."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=_TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * _TEXT_WIDTH,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=24,
            dropout_rate=0.0,
            is_encoder_decoder=False,
            use_cache=False,
        )
    )


def build_transformer() -> WanTransformer3DModel:
    """Build the denoiser: 8 blocks of width 96, an output that starts at zero."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=_TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=384,
        num_layers=8,
        rope_max_seq_len=64,
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if name in ("proj_out", "condition_embedder.time_proj"):
                nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    for block in model.blocks:
        nn.init.zeros_(block.scale_shift_table)
        nn.init.zeros_(block.attn2.to_out[0].weight)
    nn.init.zeros_(model.scale_shift_table)
    start_with_places(model)
    return model


def build_autoencoder(channels: int = LATENT_CHANNELS) -> AutoencoderKLWan:
    """Build the autoencoder: 4k + 1 frames of 64x64 to 2k + 1 latent frames of 8x8, 6 channels.

    Its spatial factor (8) is that of Wan 2.1, its shortcuts round every change of scale those of
    Wan 2.2's small model. It halves time once where Wan does it twice. A first model with 16 pixels
    by 16 and four frames in a latent knew the backgrounds and not one object after 1,100 steps.

    Args:
        channels: Number of latent channels; training starts with more.
    """
    model = AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=channels,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        is_residual=True,
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        in_channels=3 * _PATCH**2,
        out_channels=3 * _PATCH**2,
        patch_size=_PATCH,
        scale_factor_temporal=2,
        scale_factor_spatial=_SPATIAL,
    )
    # Latents start with little noise, so that the decoder has something to learn from.
    nn.init.zeros_(model.quant_conv.weight[channels:])
    nn.init.constant_(model.quant_conv.bias[channels:], -3.0)
    return model


def build_pipeline(autoencoder: AutoencoderKLWan, shift: float = SHIFT) -> WanPipeline:
    """Put an untrained pipeline round a trained autoencoder.

    Args:
        autoencoder: Autoencoder with the means and deviations of its latents set.
        shift: Shift of the sampling sigmas; Wan uses 3 for small films and 5 for large ones.
    """
    tokenizer = build_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(tokenizer),
        vae=autoencoder,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False),
        transformer=build_transformer(),
        transformer_2=None,
    )

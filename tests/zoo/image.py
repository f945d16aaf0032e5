"""Cases: image denoisers with one block list that keep the latents two-dimensional."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case
from tests.zoo.draw import (
    given,
    integers,
    long_time,
    normal,
    ones,
    residuals,
    tensor,
    time,
    zeros,
)


def _skip_layers(model: nn.Module, seed: int) -> dict[str, Any]:
    del model, seed
    return {"skip_layers": [1]}


def _rotary(*shape: int) -> tuple[Any, Any]:
    return normal(*shape), normal(*shape)


_SIZES = dict(
    original_size=tensor([[64, 64], [64, 64]]),
    target_size=tensor([[64, 64], [64, 64]]),
    crop_coords=tensor([[0, 0], [0, 0]]),
)
_LATENTS = normal(2, 4, 8, 8)
_SD3 = dict(
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    caption_projection_dim=32,
    joint_attention_dim=24,
    pooled_projection_dim=12,
    out_channels=4,
    pos_embed_max_size=8,
)
_SD3_INPUTS = given(
    hidden_states=_LATENTS,
    encoder_hidden_states=normal(2, 6, 24),
    pooled_projections=normal(2, 12),
    timestep=time(),
)
_SD3_EXTRAS = {
    "controlnet": residuals(16, 32, block_controlnet_hidden_states=2),
    "skip_layers": _skip_layers,
}

CASES = [
    Case(
        "SD3Transformer2DModel",
        "SD3Transformer2DModel",
        _SD3,
        _SD3_INPUTS,
        note="the last block returns None for the text stream",
        extras=_SD3_EXTRAS,
    ),
    Case(
        "SD3Transformer2DModel-sd35",
        "SD3Transformer2DModel",
        {**_SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        _SD3_INPUTS,
        note="Stable Diffusion 3.5: the first blocks have a second attention",
        extras=_SD3_EXTRAS,
    ),
    Case(
        "PixArtTransformer2DModel",
        "PixArtTransformer2DModel",
        dict(
            sample_size=8,
            num_layers=4,
            patch_size=2,
            attention_head_dim=16,
            num_attention_heads=2,
            in_channels=4,
            cross_attention_dim=32,
            out_channels=8,
            caption_channels=24,
            use_additional_conditions=False,
        ),
        given(
            hidden_states=_LATENTS,
            encoder_hidden_states=normal(2, 6, 24),
            timestep=long_time(),
            encoder_attention_mask=ones(2, 6),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    ),
    Case(
        "DiTTransformer2DModel",
        "DiTTransformer2DModel",
        dict(
            sample_size=8,
            num_layers=4,
            patch_size=2,
            attention_head_dim=16,
            num_attention_heads=2,
            in_channels=4,
            out_channels=8,
            num_embeds_ada_norm=10,
        ),
        given(hidden_states=_LATENTS, timestep=long_time(), class_labels=integers(10, 2)),
        note="the class embedding drops labels at random in training mode only",
    ),
    Case(
        "HunyuanDiT2DModel",
        "HunyuanDiT2DModel",
        dict(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=8,
            attention_head_dim=16,
            num_attention_heads=2,
            hidden_size=32,
            cross_attention_dim=16,
            cross_attention_dim_t5=16,
            pooled_projection_dim=8,
            text_len=4,
            text_len_t5=4,
        ),
        given(
            hidden_states=_LATENTS,
            timestep=time(),
            encoder_hidden_states=normal(2, 4, 16),
            text_embedding_mask=ones(2, 4),
            encoder_hidden_states_t5=normal(2, 4, 16),
            text_embedding_mask_t5=ones(2, 4),
            image_meta_size=tensor([[64.0, 64, 64, 64, 0, 0]] * 2),
            style=zeros(2, dtype=torch.long),
            image_rotary_emb=_rotary(16, 16),
        ),
        blocks=("blocks",),
        note="long skips: the second half of the blocks takes the outputs of the first as `skip`",
        extras={"controlnet": residuals(16, 32, controlnet_block_samples=3)},
    ),
    Case(
        "CogView3PlusTransformer2DModel",
        "CogView3PlusTransformer2DModel",
        dict(
            patch_size=2,
            in_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            out_channels=4,
            text_embed_dim=24,
            time_embed_dim=16,
            condition_dim=4,
            pos_embed_max_size=8,
            sample_size=8,
        ),
        given(
            hidden_states=_LATENTS,
            encoder_hidden_states=normal(2, 6, 24),
            timestep=long_time(),
            **_SIZES,
        ),
    ),
    Case(
        "CogView4Transformer2DModel",
        "CogView4Transformer2DModel",
        dict(
            patch_size=2,
            in_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            out_channels=4,
            text_embed_dim=24,
            time_embed_dim=16,
            condition_dim=4,
            rope_axes_dim=(8, 8),
        ),
        given(
            hidden_states=_LATENTS,
            encoder_hidden_states=normal(2, 6, 24),
            timestep=long_time(),
            **_SIZES,
        ),
    ),
    Case(
        "GlmImageTransformer2DModel",
        "GlmImageTransformer2DModel",
        dict(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=24,
            time_embed_dim=16,
            condition_dim=4,
            prior_vq_quantizer_codebook_size=32,
        ),
        given(
            hidden_states=_LATENTS,
            encoder_hidden_states=normal(2, 6, 24),
            prior_token_id=integers(32, 2, 16),
            prior_token_drop=zeros(2, 16, dtype=torch.bool),
            timestep=long_time(),
            target_size=_SIZES["target_size"],
            crop_coords=_SIZES["crop_coords"],
        ),
    ),
    Case(
        "SanaTransformer2DModel",
        "SanaTransformer2DModel",
        dict(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=24,
            sample_size=4,
        ),
        given(
            hidden_states=normal(2, 4, 4, 4),
            encoder_hidden_states=normal(2, 6, 24),
            timestep=time(),
            encoder_attention_mask=ones(2, 6),
        ),
        extras={"controlnet": residuals(16, 32, controlnet_block_samples=3)},
    ),
    Case(
        "LuminaNextDiT2DModel",
        "LuminaNextDiT2DModel",
        dict(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=4,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            learn_sigma=True,
            cross_attention_dim=24,
        ),
        given(
            hidden_states=_LATENTS,
            timestep=time(at=0.5),
            encoder_hidden_states=normal(2, 6, 24),
            encoder_mask=ones(2, 6),
            image_rotary_emb=normal(8, 8, 8),
            cross_attention_kwargs={},
        ),
        span=1.0,
        rising=True,
        blocks=("layers",),
    ),
    Case(
        "Lumina2Transformer2DModel",
        "Lumina2Transformer2DModel",
        dict(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=4,
            num_refiner_layers=4,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=2,
            axes_dim_rope=(8, 4, 4),
            axes_lens=(32, 16, 16),
            cap_feat_dim=24,
        ),
        given(
            hidden_states=_LATENTS,
            timestep=time(at=0.5),
            encoder_hidden_states=normal(2, 6, 24),
            encoder_attention_mask=ones(2, 6, dtype=torch.bool),
        ),
        span=1.0,
        rising=True,
        blocks=("noise_refiner", "context_refiner", "layers"),
    ),
]

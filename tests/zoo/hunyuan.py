"""Cases: HunyuanVideo and its successors."""

from __future__ import annotations

import torch

from tests.zoo.case import Case
from tests.zoo.draw import given, normal, ones, tensor, time
from tests.zoo.flux_like import BOTH

_HEADS = dict(num_attention_heads=2, attention_head_dim=16)
_TEXT = normal(2, 6, 24)
_HUNYUAN = dict(
    **_HEADS,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    num_single_layers=4,
    num_refiner_layers=1,
    mlp_ratio=2.0,
    patch_size=2,
    patch_size_t=1,
    guidance_embeds=True,
    text_embed_dim=24,
    pooled_projection_dim=12,
    rope_axes_dim=(4, 4, 8),
)
_HUNYUAN_INPUTS = dict(
    hidden_states=normal(2, 4, 2, 8, 8),
    timestep=time(),
    encoder_hidden_states=_TEXT,
    encoder_attention_mask=ones(2, 6),
    pooled_projections=normal(2, 12),
    guidance=time(at=6000.0),
)

CASES = [
    Case(
        "HunyuanVideoTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN,
        given(**_HUNYUAN_INPUTS),
        blocks=BOTH,
    ),
    Case(
        "HunyuanVideoTransformer3DModel-token-replace",
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "image_condition_type": "token_replace"},
        given(**_HUNYUAN_INPUTS),
        blocks=BOTH,
        note="image to video: tokens of the first frame are modulated at timestep 0",
    ),
    Case(
        "HunyuanVideo15Transformer3DModel",
        "HunyuanVideo15Transformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=2,
            patch_size_t=1,
            text_embed_dim=24,
            text_embed_2_dim=12,
            image_embed_dim=12,
            rope_axes_dim=(4, 4, 8),
            target_size=16,
            task_type="i2v",
        ),
        given(
            hidden_states=normal(2, 4, 2, 8, 8),
            timestep=time(),
            encoder_hidden_states=_TEXT,
            encoder_attention_mask=ones(2, 6),
            encoder_hidden_states_2=normal(2, 4, 12),
            encoder_attention_mask_2=ones(2, 4),
            image_embeds=normal(2, 3, 12),
        ),
    ),
    Case(
        "HunyuanVideoFramepackTransformer3DModel",
        "HunyuanVideoFramepackTransformer3DModel",
        {**_HUNYUAN, "has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True},
        given(
            **_HUNYUAN_INPUTS,
            image_embeds=normal(2, 3, 12),
            indices_latents=tensor([7, 8], torch.long),
            latents_clean=normal(2, 4, 2, 8, 8),
            indices_latents_clean=tensor([0, 9], torch.long),
            latents_history_2x=normal(2, 4, 2, 8, 8),
            indices_latents_history_2x=tensor([5, 6], torch.long),
            latents_history_4x=normal(2, 4, 4, 8, 8),
            indices_latents_history_4x=tensor([1, 2, 3, 4], torch.long),
        ),
        blocks=BOTH,
    ),
]

"""Cases: video denoisers, except the family of Wan."""

from __future__ import annotations

import torch

from tests.zoo.case import Case
from tests.zoo.draw import given, long_time, normal, ones, residuals, time

_HEADS = dict(num_attention_heads=2, attention_head_dim=16)
_TEXT = normal(2, 6, 24)
_COGVIDEOX = dict(
    **_HEADS,
    in_channels=4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=24,
    num_layers=4,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    patch_size=2,
    temporal_compression_ratio=4,
    max_text_seq_length=6,
)
_CONSISID = dict(
    cross_attn_interval=2,
    is_kps=False,
    is_train_face=True,
    cross_attn_dim_head=8,
    cross_attn_num_heads=2,
    LFE_id_dim=8,
    LFE_vit_dim=8,
    LFE_depth=5,
    LFE_dim_head=8,
    LFE_num_heads=2,
    LFE_num_id_token=2,
    LFE_num_querie=2,
    LFE_output_dim=32,
    LFE_ff_mult=1,
    LFE_num_scale=5,
)
_COSMOS = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=12,
    num_layers=4,
    mlp_ratio=2,
    text_embed_dim=24,
    adaln_lora_dim=4,
    max_size=(4, 8, 8),
    patch_size=(1, 2, 2),
    rope_scale=(2.0, 1.0, 1.0),
    concat_padding_mask=False,
    controlnet_block_every_n=2,
)

CASES = [
    Case(
        "AllegroTransformer3DModel",
        "AllegroTransformer3DModel",
        dict(
            num_attention_heads=2,
            attention_head_dim=24,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            cross_attention_dim=48,
            sample_width=8,
            sample_height=8,
            sample_frames=2,
            caption_channels=24,
        ),
        given(
            hidden_states=normal(2, 4, 2, 8, 8),
            encoder_hidden_states=_TEXT,
            timestep=long_time(),
            attention_mask=ones(2, 2, 8, 8),
            encoder_attention_mask=ones(2, 1, 6),
        ),
    ),
    Case(
        "CogVideoXTransformer3DModel",
        "CogVideoXTransformer3DModel",
        _COGVIDEOX,
        given(
            hidden_states=normal(2, 2, 4, 8, 8), encoder_hidden_states=_TEXT, timestep=long_time()
        ),
    ),
    Case(
        "CogVideoXTransformer3DModel-15",
        "CogVideoXTransformer3DModel",
        {**_COGVIDEOX, "patch_size_t": 2, "use_rotary_positional_embeddings": True},
        given(
            hidden_states=normal(2, 2, 4, 8, 8),
            encoder_hidden_states=_TEXT,
            timestep=long_time(),
            image_rotary_emb=(normal(16, 16), normal(16, 16)),
        ),
        note="CogVideoX 1.5: temporal patches and rotary positions",
    ),
    Case(
        "ConsisIDTransformer3DModel",
        "ConsisIDTransformer3DModel",
        {**_COGVIDEOX, **_CONSISID, "attention_head_dim": 24, "num_layers": 8},
        given(
            hidden_states=normal(2, 2, 4, 8, 8),
            encoder_hidden_states=_TEXT,
            timestep=long_time(),
            id_cond=normal(2, 8),
            id_vit_hidden=[normal(2, 3, 8) for _ in range(5)],
        ),
        note="the loop adds a face residual to the stream after every second block",
    ),
    Case(
        "CosmosTransformer3DModel",
        "CosmosTransformer3DModel",
        _COSMOS,
        given(
            hidden_states=normal(2, 4, 2, 8, 8),
            timestep=time(at=0.5),
            encoder_hidden_states=_TEXT,
            fps=24,
        ),
        span=1.0,
        note="the padding mask channel is left out: resizing it needs torchvision",
        extras={"controlnet": residuals(32, 24, block_controlnet_hidden_states=2)},
    ),
    Case(
        "EasyAnimateTransformer3DModel",
        "EasyAnimateTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            sample_width=8,
            sample_height=8,
            num_layers=4,
            mmdit_layers=4,
            time_embed_dim=8,
            text_embed_dim=24,
        ),
        given(
            hidden_states=normal(2, 4, 2, 8, 8), timestep=long_time(), encoder_hidden_states=_TEXT
        ),
    ),
    Case(
        "LatteTransformer3DModel",
        "LatteTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=8,
            num_layers=4,
            cross_attention_dim=32,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            caption_channels=24,
            video_length=2,
        ),
        given(
            hidden_states=normal(2, 4, 2, 8, 8), timestep=long_time(), encoder_hidden_states=_TEXT
        ),
        blocks=("transformer_blocks", "temporal_transformer_blocks"),
        note="zips spatial and temporal blocks and reshapes the stream between them",
    ),
    Case(
        "LTXVideoTransformer3DModel",
        "LTXVideoTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=32,
            num_layers=4,
            caption_channels=24,
        ),
        given(
            hidden_states=normal(2, 32, 4),
            encoder_hidden_states=_TEXT,
            timestep=time(),
            encoder_attention_mask=ones(2, 6),
            num_frames=2,
            height=4,
            width=4,
        ),
    ),
    Case(
        "MochiTransformer3DModel",
        "MochiTransformer3DModel",
        dict(
            **_HEADS,
            patch_size=2,
            num_layers=4,
            pooled_projection_dim=12,
            in_channels=4,
            text_embed_dim=24,
            time_embed_dim=8,
            max_sequence_length=6,
        ),
        given(
            hidden_states=normal(2, 4, 2, 8, 8),
            encoder_hidden_states=_TEXT,
            timestep=time(),
            encoder_attention_mask=ones(2, 6, dtype=torch.bool),
        ),
        rising=True,
        note="the last block updates the image stream only",
    ),
    Case(
        "SanaVideoTransformer3DModel",
        "SanaVideoTransformer3DModel",
        dict(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=24,
            sample_size=4,
            patch_size=(1, 2, 2),
            rope_max_seq_len=16,
        ),
        given(
            hidden_states=normal(2, 4, 2, 8, 8), encoder_hidden_states=_TEXT, timestep=long_time()
        ),
        extras={"controlnet": residuals(32, 24, controlnet_block_samples=2)},
    ),
]

"""Cases: Wan and the video denoisers that grew out of it."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.draw import given, integers, long_time, normal, tensor, time

_WAN = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    freq_dim=16,
    ffn_dim=32,
    num_layers=4,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
)
_LATENTS = normal(2, 4, 2, 8, 8)
_TEXT = normal(2, 6, 24)
_BLOCKS = ("blocks",)
_ANYFLOW = {
    **{key: value for key, value in _WAN.items() if key != "qk_norm"},
    "rope_max_seq_len": 32,
    "gate_value": 0.25,
    "deltatime_type": "r",
}

CASES = [
    Case(
        "WanTransformer3DModel",
        "WanTransformer3DModel",
        {**_WAN, "rope_max_seq_len": 32},
        given(hidden_states=_LATENTS, timestep=long_time(), encoder_hidden_states=_TEXT),
        blocks=_BLOCKS,
    ),
    Case(
        "WanTransformer3DModel-i2v",
        "WanTransformer3DModel",
        {
            **_WAN,
            "in_channels": 12,
            "rope_max_seq_len": 32,
            "image_dim": 16,
            "added_kv_proj_dim": 24,
        },
        given(
            hidden_states=normal(2, 12, 2, 8, 8),
            timestep=long_time(),
            encoder_hidden_states=_TEXT,
            encoder_hidden_states_image=normal(2, 5, 16),
        ),
        blocks=_BLOCKS,
        note="image to video: a second cross-attention over image tokens",
    ),
    Case(
        "WanTransformer3DModel-ti2v",
        "WanTransformer3DModel",
        {**_WAN, "rope_max_seq_len": 32},
        given(hidden_states=_LATENTS, timestep=time(2, 32), encoder_hidden_states=_TEXT),
        blocks=_BLOCKS,
        note="Wan 2.2 5B: one timestep for each token",
    ),
    Case(
        "ChronoEditTransformer3DModel",
        "ChronoEditTransformer3DModel",
        {**_WAN, "rope_max_seq_len": 32, "rope_temporal_skip_len": 8},
        given(hidden_states=_LATENTS, timestep=long_time(), encoder_hidden_states=_TEXT),
        blocks=_BLOCKS,
    ),
    Case(
        "SkyReelsV2Transformer3DModel",
        "SkyReelsV2Transformer3DModel",
        {**_WAN, "rope_max_seq_len": 32, "inject_sample_info": True},
        given(
            hidden_states=_LATENTS,
            timestep=long_time(),
            encoder_hidden_states=_TEXT,
            fps=integers(2, 2),
        ),
        blocks=_BLOCKS,
    ),
    Case(
        "SkyReelsV2Transformer3DModel-forcing",
        "SkyReelsV2Transformer3DModel",
        {**_WAN, "rope_max_seq_len": 32},
        given(
            hidden_states=_LATENTS,
            timestep=long_time(2, 2),
            encoder_hidden_states=_TEXT,
            enable_diffusion_forcing=True,
        ),
        blocks=_BLOCKS,
        note="diffusion forcing: one timestep for each frame",
    ),
    Case(
        "WanVACETransformer3DModel",
        "WanVACETransformer3DModel",
        {
            **_WAN,
            "rope_max_seq_len": 32,
            "num_layers": 8,
            "vace_layers": [0, 2, 4, 6],
            "vace_in_channels": 12,
        },
        given(
            hidden_states=_LATENTS,
            timestep=long_time(),
            encoder_hidden_states=_TEXT,
            control_hidden_states=normal(2, 12, 2, 8, 8),
        ),
        blocks=("blocks", "vace_blocks"),
        note="the second list runs first; its outputs are added to the stream between the blocks",
    ),
    Case(
        "WanAnimateTransformer3DModel",
        "WanAnimateTransformer3DModel",
        {
            **_WAN,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 16,
            "rope_max_seq_len": 32,
            "num_layers": 8,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        given(
            hidden_states=normal(2, 12, 3, 8, 8),
            timestep=long_time(),
            encoder_hidden_states=_TEXT,
            encoder_hidden_states_image=normal(2, 5, 16),
            pose_hidden_states=normal(2, 4, 2, 8, 8),
            face_pixel_values=normal(2, 3, 5, 16, 16),
        ),
        blocks=("blocks", "face_adapter"),
        note="the loop adds a face residual after every second block",
    ),
    Case(
        "AnyFlowTransformer3DModel",
        "AnyFlowTransformer3DModel",
        _ANYFLOW,
        given(
            hidden_states=normal(2, 2, 4, 8, 8),
            timestep=time(2, 2),
            r_timestep=time(2, 2, at=250.0),
            encoder_hidden_states=_TEXT,
        ),
        blocks=_BLOCKS,
        note="flow map: a second timestep says where the step ends",
    ),
    Case(
        "AnyFlowFARTransformer3DModel",
        "AnyFlowFARTransformer3DModel",
        {**_ANYFLOW, "compressed_patch_size": (1, 4, 4), "full_chunk_limit": 3},
        given(
            hidden_states=normal(2, 4, 4, 8, 8),
            timestep=time(2, 4),
            r_timestep=time(2, 4, at=250.0),
            encoder_hidden_states=_TEXT,
            chunk_partition=[2, 2],
        ),
        blocks=_BLOCKS,
        note="chunked, here without a KV cache; flex attention, so no gradient on the CPU",
    ),
    Case(
        "HeliosTransformer3DModel",
        "HeliosTransformer3DModel",
        {**_WAN, "rope_dim": (4, 4, 4)},
        given(
            hidden_states=_LATENTS,
            timestep=long_time(),
            encoder_hidden_states=_TEXT,
            indices_hidden_states=tensor([[6, 7]] * 2),
            indices_latents_history_short=tensor([[5]] * 2),
            indices_latents_history_mid=tensor([[4]] * 2),
            indices_latents_history_long=tensor([[0, 1, 2, 3]] * 2),
            latents_history_short=normal(2, 4, 1, 8, 8),
            latents_history_mid=normal(2, 4, 1, 8, 8),
            latents_history_long=normal(2, 4, 4, 8, 8),
        ),
        blocks=_BLOCKS,
        note="tokens of history frames precede the noisy tokens in the stream",
    ),
]

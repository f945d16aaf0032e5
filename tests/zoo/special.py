"""Cases: classes whose inputs are packed, cached or prepared in a way of their own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.draw import (
    given,
    integers,
    long_time,
    normal,
    ones,
    tensor,
    time,
    zeros,
)

_HEADS = dict(num_attention_heads=2, attention_head_dim=16)
_TEXT = normal(2, 6, 24)


def _refiner_inputs(model: Any, seed: int) -> dict[str, Any]:
    made = given(
        hidden_states=normal(2, 32, 4),
        encoder_hidden_states=_TEXT,
        timestep=time(2, 1),
        encoder_attention_mask=ones(2, 6),
    )(model, seed)
    made["video_rotary_emb"] = model.build_rotary_emb_for_absolute_positions(
        batch_size=2,
        frame_positions=[0, 1],
        height=4,
        width=4,
        device=torch.device("cpu"),
        fps=16.0,
    )
    return made


def _wan_animate_2_inputs(model: Any, seed: int) -> dict[str, Any]:
    made = given(
        hidden_states=[normal(4, 3, 4, 4)],
        timestep=time(1),
        encoder_hidden_states=[normal(6, 24)],
        condition_latents=[normal(8, 3, 4, 4)],
        kv_cache_mode="cached",
        seq_len=12,
        encoder_hidden_states_image=normal(1, 4, 1280),
        reference_grid_sizes=tensor([[2, 2, 2]], torch.long),
        origin_len=5,
        origin_area=[32, 32],
    )(model, seed)
    made["kv_cache"] = _filled(model.config.num_layers, seed + 2)
    return made


@cache
def _filled(layers: int, seed: int) -> Any:
    """Return a KV cache as a first call leaves it, which the calls of a run share."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    generator = torch.Generator().manual_seed(seed)
    filled = WanAnimate2KVCache(layers)
    for layer in filled.layer_caches:
        key, value = torch.randn(2, 1, 8, 2, 16, generator=generator)
        layer.store(key, value)
    return filled


CASES = [
    Case(
        "Kandinsky5Transformer3DModel",
        "Kandinsky5Transformer3DModel",
        dict(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=24,
            in_text_dim2=12,
            time_dim=16,
            patch_size=(1, 2, 2),
            model_dim=32,
            ff_dim=48,
            num_text_blocks=4,
            num_visual_blocks=4,
            axes_dims=(4, 6, 6),
        ),
        given(
            hidden_states=normal(2, 2, 8, 8, 4),
            encoder_hidden_states=_TEXT,
            timestep=time(),
            pooled_projections=normal(2, 12),
            visual_rope_pos=[tensor(range(n), torch.long) for n in (2, 4, 4)],
            text_rope_pos=tensor(range(6), torch.long),
        ),
        blocks=("text_transformer_blocks", "visual_transformer_blocks"),
        note="channels last; the visual stream keeps its grid, [B, F, H, W, D]",
    ),
    Case(
        "Kandinsky6SRTransformer3DModel",
        "Kandinsky6SRTransformer3DModel",
        dict(
            in_visual_dim=4,
            out_visual_dim=4,
            time_dim=16,
            patch_size=(1, 1, 1),
            model_dim=32,
            ff_dim=48,
            num_visual_blocks=4,
            axes_dims=(4, 6, 6),
            nabla_window=(3, 3, 3),
        ),
        given(hidden_states=normal(2, 1, 8, 8, 9), timestep=time()),
        blocks=("visual_transformer_blocks",),
        note="block-sparse flex attention: no gradient on the CPU, token grid in eights",
    ),
    Case(
        "SanaWMTransformer3DModel",
        "SanaWMTransformer3DModel",
        dict(
            in_channels=4,
            num_layers=8,
            hidden_size=32,
            num_attention_heads=2,
            linear_head_dim=16,
            chunk_plucker_channels=6,
            chunk_plucker_post_attn_blocks=8,
            caption_channels=24,
            mlp_ratio=2.0,
        ),
        given(
            hidden_states=normal(2, 4, 2, 4, 4),
            timestep=time(2, 1, 2),
            encoder_hidden_states=normal(2, 1, 6, 24),
            encoder_attention_mask=ones(2, 6),
            chunk_plucker=normal(2, 6, 2, 4, 4),
        ),
        blocks=("blocks",),
        note="one timestep for each frame; every fourth block has softmax attention",
    ),
    Case(
        "SanaWMLTX2RefinerTransformer3DModel",
        "SanaWMLTX2RefinerTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=32,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=4,
            caption_channels=24,
            rope_double_precision=False,
        ),
        _refiner_inputs,
        note="the video half of LTX-2: audio weights are loaded and never run; here no KV cache",
    ),
    Case(
        "WanAnimate2Transformer3DModel",
        "WanAnimate2Transformer3DModel",
        dict(
            text_len=8,
            in_dim=12,
            dim=32,
            ffn_dim=48,
            freq_dim=16,
            text_dim=24,
            out_dim=4,
            num_heads=2,
            num_layers=4,
        ),
        _wan_animate_2_inputs,
        blocks=("blocks",),
        note="batch 1; reads a cache of reference keys, here random; flex attention: no gradient",
    ),
    Case(
        "Cosmos3OmniTransformer",
        "Cosmos3OmniTransformer",
        dict(
            head_dim=16,
            hidden_size=32,
            intermediate_size=48,
            latent_channel=4,
            latent_patch_size=1,
            patch_latent_dim=4,
            num_attention_heads=2,
            num_hidden_layers=4,
            num_key_value_heads=1,
            vocab_size=32,
            rope_axes_dim=[4, 2, 2],
        ),
        given(
            input_ids=integers(32, 4),
            text_indexes=tensor(range(4), torch.long),
            position_ids=tensor([list(range(20))] * 3, torch.long),
            und_len=4,
            sequence_length=20,
            vision_tokens=[normal(1, 4, 1, 4, 4)],
            vision_token_shapes=[(1, 4, 4)],
            vision_sequence_indexes=tensor(range(4, 20), torch.long),
            vision_mse_loss_indexes=tensor(range(4, 20), torch.long),
            vision_timesteps=time(16),
            vision_noisy_frame_indexes=[tensor([0], torch.long)],
        ),
        timestep="vision_timesteps",
        latents=("vision_tokens",),
        blocks=("layers",),
        note="one packed sample without a batch axis; text and vision streams are [tokens, D]",
    ),
    Case(
        "RFD4ProteinaTransformer",
        "RFD4ProteinaTransformer",
        dict(
            nlayers=4,
            token_dim=32,
            nheads=2,
            dim_cond=16,
            pair_repr_dim=16,
            latent_dim=4,
            t_emb_dim=16,
            feats_seq=("xt_bb_ca", "xt_local_latents"),
            feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents"),
            feats_pair_repr=("xt_bb_ca_pair_dists",),
            feats_pair_cond=("time_emb_bb_ca", "time_emb_local_latents"),
            tri_mult_c=16,
            num_sequence_classes=8,
        ),
        given(
            bb_ca=normal(2, 10, 3),
            local_latents=normal(2, 10, 4),
            bb_ca_time=time(at=0.5),
            local_latents_time=time(at=0.5),
            padding_mask=ones(2, 10, dtype=torch.bool),
            conditioning={
                "is_in_context_conditioning": zeros(2, 10, dtype=torch.bool),
                "supports_local_latent": ones(2, 10, dtype=torch.bool),
            },
        ),
        timestep="bb_ca_time",
        times=("local_latents_time",),
        span=1.0,
        rising=True,
        latents=("bb_ca", "local_latents"),
        blocks=("transformer_layers",),
        note="proteins: a pair tensor is updated between the layers, four outputs",
    ),
    Case(
        "Transformer2DModel",
        "Transformer2DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=8,
            num_layers=4,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=10,
            norm_type="ada_norm_zero",
            norm_elementwise_affine=False,
        ),
        given(hidden_states=normal(2, 4, 8, 8), timestep=long_time(), class_labels=integers(10, 2)),
        note="the patched form, as DiT once used it; the convolutional form is part of UNets",
    ),
    Case(
        "DreamLiteTransformer2DModel",
        "DreamLiteTransformer2DModel",
        dict(**_HEADS, in_channels=32, num_layers=4, norm_num_groups=8, cross_attention_dim=24),
        given(hidden_states=normal(2, 32, 4, 4), encoder_hidden_states=_TEXT, timestep=long_time()),
        timestep="",
        note="a part of DreamLiteUNetModel: takes a timestep that its blocks do not use",
    ),
    Case(
        "TransformerTemporalModel",
        "TransformerTemporalModel",
        dict(**_HEADS, in_channels=32, num_layers=4),
        given(hidden_states=normal(4, 32, 4, 4), num_frames=2, timestep=long_time()),
        timestep="",
        note="a part of video UNets: takes a timestep that its blocks do not use",
    ),
]

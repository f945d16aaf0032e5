"""Cases: image denoisers with double blocks followed by single blocks, as in FLUX."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Inputs
from tests.zoo.draw import given, grid_ids, normal, ones, residuals, time

BOTH = ("transformer_blocks", "single_transformer_blocks")


_FLUX = dict(
    in_channels=8,
    num_layers=4,
    num_single_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=24,
    axes_dims_rope=(4, 4, 8),
)


def _flux_inputs(**more: Any) -> Inputs:
    return given(
        **{
            "hidden_states": normal(2, 16, 8),
            "encoder_hidden_states": normal(2, 6, 24),
            "timestep": time(at=0.5),
            "img_ids": grid_ids(4, 4),
            "txt_ids": grid_ids(6),
            **more,
        }
    )


_CONTROL = residuals(16, 32, controlnet_block_samples=2, controlnet_single_block_samples=2)

CASES = [
    Case(
        "FluxTransformer2DModel",
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 12, "guidance_embeds": True},
        _flux_inputs(pooled_projections=normal(2, 12), guidance=time(at=3.5)),
        span=1.0,
        blocks=BOTH,
        extras={"controlnet": _CONTROL},
    ),
    Case(
        "Flux2Transformer2DModel",
        "Flux2Transformer2DModel",
        {**_FLUX, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": True},
        _flux_inputs(
            img_ids=grid_ids(4, 4, 1, axes=4), txt_ids=grid_ids(6, axes=4), guidance=time(at=3.5)
        ),
        span=1.0,
        blocks=BOTH,
        note="single blocks take and return the text and image streams as one tensor",
    ),
    Case(
        "Flux3Transformer2DModel",
        "Flux3Transformer2DModel",
        {
            **_FLUX,
            "cond_in_channels": 8,
            "num_layers": 4,
            "axes_dims_rope": (4, 4, 4, 4),
            "timestep_channels": 32,
        },
        _flux_inputs(
            img_ids=grid_ids(4, 4, 1, axes=4),
            txt_ids=grid_ids(6, axes=4),
            image_cond_hidden_states=normal(2, 4, 8),
            image_cond_ids=grid_ids(2, 2, 1, axes=4),
        ),
        span=1.0,
        blocks=(
            "txt_mode_blocks",
            "mode_blocks.image",
            "mode_blocks.image_cond",
            "single_transformer_blocks",
        ),
        note="three early lists, two of them in a ModuleDict, run before the joint blocks",
    ),
    Case(
        "ChromaTransformer2DModel",
        "ChromaTransformer2DModel",
        {
            **_FLUX,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 2,
        },
        _flux_inputs(attention_mask=ones(2, 22, dtype=torch.bool)),
        span=1.0,
        blocks=BOTH,
        extras={"controlnet": _CONTROL},
    ),
    Case(
        "BriaTransformer2DModel",
        "BriaTransformer2DModel",
        {**_FLUX, "axes_dims_rope": [0, 8, 8], "pooled_projection_dim": None},
        _flux_inputs(timestep=time()),
        blocks=BOTH,
        note="residuals for the single blocks do not fit in diffusers 0.42: wrong length expected",
        extras={"controlnet": residuals(16, 32, controlnet_block_samples=2)},
    ),
    Case(
        "BriaFiboTransformer2DModel",
        "BriaFiboTransformer2DModel",
        {
            **_FLUX,
            "axes_dims_rope": [0, 8, 8],
            "pooled_projection_dim": None,
            "text_encoder_dim": 12,
            "joint_attention_dim": 24,
        },
        _flux_inputs(
            timestep=time(), text_encoder_layers=[normal(2, 6, 12, scale=1.0) for _ in range(8)]
        ),
        blocks=BOTH,
        note="every block overwrites half of the text stream with one text encoder layer",
    ),
    Case(
        "OvisImageTransformer2DModel",
        "OvisImageTransformer2DModel",
        {**_FLUX, "out_channels": 8},
        _flux_inputs(),
        span=1.0,
        blocks=BOTH,
    ),
    Case(
        "LongCatImageTransformer2DModel",
        "LongCatImageTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 24},
        _flux_inputs(guidance=time(at=3.5)),
        span=1.0,
        blocks=BOTH,
    ),
    Case(
        "AuraFlowTransformer2DModel",
        "AuraFlowTransformer2DModel",
        dict(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=4,
            num_single_dit_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            caption_projection_dim=32,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        given(
            hidden_states=normal(2, 4, 8, 8),
            encoder_hidden_states=normal(2, 6, 24),
            timestep=time(at=0.5),
        ),
        span=1.0,
        blocks=("joint_transformer_blocks", "single_transformer_blocks"),
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        "HunyuanImageTransformer2DModel",
        dict(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=4,
            num_single_layers=4,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=(1, 1),
            guidance_embeds=True,
            text_embed_dim=24,
            text_embed_2_dim=12,
            rope_axes_dim=(8, 8),
        ),
        given(
            hidden_states=normal(2, 8, 4, 4),
            timestep=time(),
            encoder_hidden_states=normal(2, 6, 24),
            encoder_attention_mask=ones(2, 6),
            encoder_hidden_states_2=normal(2, 4, 12),
            encoder_attention_mask_2=ones(2, 4),
            guidance=time(at=3500.0),
        ),
        blocks=BOTH,
    ),
    Case(
        "HiDreamImageTransformer2DModel",
        "HiDreamImageTransformer2DModel",
        dict(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            num_single_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[24, 12],
            text_emb_dim=8,
            num_routed_experts=2,
            num_activated_experts=2,
            axes_dims_rope=(8, 4, 4),
            max_resolution=(8, 8),
            llama_layers=(0, 1, 0, 1, 0, 1, 0, 1),
            force_inference_output=True,
        ),
        given(
            hidden_states=normal(2, 4, 8, 8),
            timesteps=time(),
            encoder_hidden_states_t5=normal(2, 6, 24),
            encoder_hidden_states_llama3=normal(2, 2, 6, 12),
            pooled_embeds=normal(2, 8),
        ),
        timestep="timesteps",
        blocks=("double_stream_blocks", "single_stream_blocks"),
        note="the loop appends a text encoder layer to a stream before each block, cuts it after",
    ),
    Case(
        "MotifVideoTransformer3DModel",
        "MotifVideoTransformer3DModel",
        dict(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=4,
            num_single_layers=8,
            num_decoder_layers=4,
            mlp_ratio=2.0,
            patch_size=2,
            patch_size_t=1,
            text_embed_dim=24,
            image_embed_dim=12,
            rope_axes_dim=(4, 4, 8),
        ),
        given(
            hidden_states=normal(2, 9, 2, 8, 8),
            timestep=time(),
            encoder_hidden_states=normal(2, 6, 24),
            encoder_attention_mask=ones(2, 6),
            image_embeds=normal(2, 3, 12),
        ),
        blocks=BOTH,
        note="single blocks are sliced into encoder and decoder; the text is reset between them",
    ),
]

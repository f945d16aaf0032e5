"""Cases: image denoisers with one list of joint or single-stream blocks over packed tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.draw import (
    given,
    grid_ids,
    normal,
    ones,
    residuals,
    tensor,
    time,
)

_HEADS = dict(num_attention_heads=2, attention_head_dim=16)
_TEXT = normal(2, 6, 24)
_IMAGE_TOKENS, _TEXT_TOKENS = [2] * 16, [3] * 6


def _z_image_control(model: Any, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed + 1)
    width = model.config.dim
    return {
        "controlnet_block_samples": {
            index: 0.3 * torch.randn(2, _Z_TOKENS, width, generator=generator) for index in (0, 2)
        }
    }


_Z_TOKENS = 64  # image and text tokens are each padded to a multiple of 32

_QWEN = dict(
    **_HEADS,
    patch_size=2,
    in_channels=16,
    out_channels=4,
    num_layers=4,
    joint_attention_dim=24,
    axes_dims_rope=(8, 4, 4),
)
_QWEN_INPUTS = dict(
    hidden_states=normal(2, 16, 16),
    encoder_hidden_states=_TEXT,
    encoder_hidden_states_mask=ones(2, 6, dtype=torch.bool),
    timestep=time(at=0.5),
    img_shapes=[[(1, 4, 4)], [(1, 4, 4)]],
)

CASES = [
    Case(
        "QwenImageTransformer2DModel",
        "QwenImageTransformer2DModel",
        _QWEN,
        given(**_QWEN_INPUTS),
        span=1.0,
        extras={"controlnet": residuals(16, 32, controlnet_block_samples=2)},
    ),
    Case(
        "QwenImageTransformer2DModel-edit",
        "QwenImageTransformer2DModel",
        {**_QWEN, "zero_cond_t": True},
        given(
            **{
                **_QWEN_INPUTS,
                "hidden_states": normal(2, 20, 16),
                "img_shapes": [[(1, 4, 4), (1, 2, 2)]] * 2,
            }
        ),
        span=1.0,
        note="edit: reference image tokens follow the noisy tokens and are modulated at timestep 0",
    ),
    Case(
        "QwenImage21Transformer2DModel",
        "QwenImage21Transformer2DModel",
        dict(
            **_HEADS,
            in_channels=8,
            out_channels=8,
            num_layers=4,
            context_in_dim=24,
            axes_dims_rope=(4, 4, 8),
        ),
        given(
            hidden_states=normal(2, 16, 8),
            encoder_hidden_states=_TEXT,
            timestep=time(at=0.5),
            img_shapes=[[(1, 4, 4)], [(1, 4, 4)]],
            img_mask=tensor([[False] * 6 + [True] * 4] * 2, torch.bool),
        ),
        span=1.0,
        note="one causal stream of text and image tokens; the output covers all of them",
    ),
    Case(
        "NucleusMoEImageTransformer2DModel",
        "NucleusMoEImageTransformer2DModel",
        dict(
            **_HEADS,
            in_channels=16,
            out_channels=4,
            num_layers=6,
            joint_attention_dim=24,
            axes_dims_rope=(8, 4, 4),
            mlp_ratio=6.0,
            num_experts=4,
            moe_intermediate_dim=16,
            capacity_factors=[2.0] * 6,
        ),
        given(
            hidden_states=normal(2, 16, 16),
            img_shapes=[(1, 4, 4), (1, 4, 4)],
            encoder_hidden_states=_TEXT,
            encoder_hidden_states_mask=ones(2, 6, dtype=torch.long),
            timestep=time(at=0.5),
        ),
        span=1.0,
        note="mixture of experts in two of six blocks; the text keys are fixed over the blocks",
    ),
    Case(
        "ZImageTransformer2DModel",
        "ZImageTransformer2DModel",
        dict(
            in_channels=4,
            dim=32,
            n_layers=4,
            n_refiner_layers=4,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=24,
            axes_dims=[4, 4, 8],
            axes_lens=[64, 32, 32],
        ),
        given(
            x=[normal(4, 1, 8, 8), normal(4, 1, 8, 8)],
            t=time(at=0.5),
            cap_feats=[normal(6, 24), normal(5, 24)],
        ),
        timestep="t",
        span=1.0,
        rising=True,
        latents=("x",),
        blocks=("noise_refiner", "context_refiner", "layers"),
        note="lists in, lists out: one tensor for each sample",
        extras={"controlnet": _z_image_control},
    ),
    Case(
        "ErnieImageTransformer2DModel",
        "ErnieImageTransformer2DModel",
        dict(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=4,
            ffn_hidden_size=48,
            in_channels=8,
            out_channels=8,
            text_in_dim=24,
            rope_axes_dim=(8, 4, 4),
        ),
        given(
            hidden_states=normal(2, 8, 4, 4),
            timestep=time(),
            text_bth=_TEXT,
            text_lens=tensor([6, 5], torch.long),
        ),
        blocks=("layers",),
        note="the stream is [tokens, batch, channels]",
    ),
    Case(
        "Ideogram4Transformer2DModel",
        "Ideogram4Transformer2DModel",
        dict(
            **_HEADS,
            in_channels=8,
            num_layers=4,
            intermediate_size=48,
            adaln_dim=16,
            llm_features_dim=24,
            rope_theta=10000,
            mrope_section=(4, 2, 2),
        ),
        given(
            hidden_states=normal(2, 22, 8),
            timestep=time(at=0.5),
            encoder_hidden_states=normal(2, 22, 24),
            position_ids=tensor(
                [[[i, i, i] for i in range(6)] + [[9, 9 + i // 4, 9 + i % 4] for i in range(16)]]
                * 2,
                torch.long,
            ),
            segment_ids=ones(2, 22, dtype=torch.long),
            indicator=tensor([_TEXT_TOKENS + _IMAGE_TOKENS] * 2, torch.long),
        ),
        span=1.0,
        rising=True,
        blocks=("layers",),
        note="one stream; an indicator says which tokens are text and which are the image",
    ),
    Case(
        "Krea2Transformer2DModel",
        "Krea2Transformer2DModel",
        dict(
            **_HEADS,
            in_channels=8,
            num_layers=4,
            num_key_value_heads=1,
            intermediate_size=48,
            timestep_embed_dim=16,
            text_hidden_dim=24,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=32,
            num_layerwise_text_blocks=2,
            num_refiner_text_blocks=2,
            axes_dims_rope=(4, 6, 6),
        ),
        given(
            hidden_states=normal(2, 16, 8),
            encoder_hidden_states=normal(2, 6, 3, 24),
            timestep=time(at=0.5),
            position_ids=grid_ids(22),
            encoder_attention_mask=ones(2, 6, dtype=torch.bool),
        ),
        span=1.0,
        note="text features of several encoder layers are fused by blocks of their own first",
    ),
    Case(
        "BriaFibo2Transformer2DModel",
        "BriaFibo2Transformer2DModel",
        dict(
            in_channels=4,
            patch_size=2,
            dim=32,
            n_layers=4,
            n_refiner_layers=4,
            n_heads=2,
            cap_feat_dim=24,
            injection_layer_ids=(1, 3),
            perceiver_num_layers=2,
            min_num_gist_tokens=2,
            max_num_gist_tokens=4,
            gist_step=2,
            gist_min_text_len=4,
            gist_max_text_len=8,
            axes_dims=(4, 4, 8),
            axes_lens=(32, 16, 16),
        ),
        given(
            hidden_states=normal(2, 4, 8, 8),
            timestep=time(at=0.5),
            encoder_hidden_states=normal(2, 3, 6, 24),
        ),
        span=1.0,
        blocks=("noise_refiner", "layers"),
        note="some blocks get text of their own",
    ),
]

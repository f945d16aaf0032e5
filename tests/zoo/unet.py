"""Cases: UNet2DConditionModel and the other two-dimensional UNets."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Case, Inputs
from tests.zoo.draw import given, integers, long_time, normal, ones, tensor, time

UNET_BLOCKS = ("down_blocks", "up_blocks")
_SIZE = 16


def short(levels: int) -> dict[str, str]:
    """State for both block lists that a UNet has one block for each of its few resolutions."""
    return dict.fromkeys(UNET_BLOCKS, f"a UNet has one block a resolution, here {levels}")


def _control(model: Any, seed: int) -> dict[str, Any]:
    """Make ControlNet residuals, one for each skip connection and one for the middle."""
    generator = torch.Generator().manual_seed(seed + 1)
    channels, config = model.config.block_out_channels, model.config
    shapes, size = [(channels[0], _SIZE)], _SIZE
    for level, width in enumerate(channels):
        shapes += [(width, size)] * config.layers_per_block
        if level < len(channels) - 1:
            size //= 2
            shapes.append((width, size))
    drawn = [
        0.3 * torch.randn(2, width, side, side, generator=generator)
        for width, side in [*shapes, (channels[-1], size)]
    ]
    return {
        "down_block_additional_residuals": tuple(drawn[:-1]),
        "mid_block_additional_residual": drawn[-1],
    }


def _adapter(model: Any, seed: int) -> dict[str, Any]:
    """Make the residuals of a T2I adapter, one for each down block."""
    generator = torch.Generator().manual_seed(seed + 1)
    channels, size, drawn = model.config.block_out_channels, _SIZE, []
    for level, (kind, width) in enumerate(
        zip(model.config.down_block_types, channels, strict=True)
    ):
        after = size // 2 if level < len(channels) - 1 else size
        side = size if "CrossAttn" in kind else after
        drawn.append(0.3 * torch.randn(2, width, side, side, generator=generator))
        size = after
    return {"down_intrablock_additional_residuals": drawn}


def _unet_inputs(**more: Any) -> Inputs:
    return given(
        sample=normal(2, 4, _SIZE, _SIZE),
        timestep=long_time(),
        encoder_hidden_states=normal(2, 6, 24),
        **more,
    )


SD15 = dict(
    sample_size=_SIZE,
    down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    block_out_channels=(16, 16, 32, 32),
    layers_per_block=2,
    norm_num_groups=8,
    cross_attention_dim=24,
    attention_head_dim=2,
)
SDXL = dict(
    sample_size=_SIZE,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(16, 32, 32),
    layers_per_block=2,
    norm_num_groups=8,
    cross_attention_dim=24,
    attention_head_dim=(1, 2, 2),
    transformer_layers_per_block=(1, 2, 4),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=12 + 6 * 8,
)
_COMMON: dict[str, Any] = dict(latents=("sample",), blocks=UNET_BLOCKS)

CASES = [
    Case(
        "UNet2DConditionModel",
        "UNet2DConditionModel",
        SD15,
        _unet_inputs(),
        **_COMMON,
        note="Stable Diffusion 1.5: blocks change shape and hand skip connections over",
        extras={"controlnet": _control, "adapter": _adapter},
    ),
    Case(
        "UNet2DConditionModel-sdxl",
        "UNet2DConditionModel",
        SDXL,
        _unet_inputs(
            added_cond_kwargs={
                "text_embeds": normal(2, 12),
                "time_ids": tensor([[128.0, 128, 0, 0, 128, 128]] * 2),
            }
        ),
        **_COMMON,
        short=short(3),
        note="SDXL: several transformer layers in each attention of the lower resolutions",
        extras={"controlnet": _control, "adapter": _adapter},
    ),
    Case(
        "UNet2DModel",
        "UNet2DModel",
        dict(
            sample_size=_SIZE,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, 16, 32, 32),
            layers_per_block=1,
            attention_head_dim=8,
            norm_num_groups=8,
        ),
        given(sample=normal(2, 4, _SIZE, _SIZE), timestep=long_time()),
        **_COMMON,
        note="unconditional",
    ),
    Case(
        "UNet2DModel-skip",
        "UNet2DModel",
        dict(
            sample_size=_SIZE,
            in_channels=3,
            out_channels=3,
            down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D") + ("SkipDownBlock2D",) * 2,
            up_block_types=("SkipUpBlock2D",) * 2 + ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
            block_out_channels=(32, 64, 64, 64),
            layers_per_block=1,
            time_embedding_type="fourier",
            norm_num_groups=None,
            norm_eps=1e-6,
        ),
        given(sample=normal(2, 3, _SIZE, _SIZE), timestep=time(at=5.0)),
        **_COMMON,
        span=10.0,
        note="NCSN++: blocks carry an image-space skip sample along; the output is divided by t",
    ),
    Case(
        "UNetControlNetXSModel",
        "UNetControlNetXSModel",
        dict(
            sample_size=_SIZE,
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
            block_out_channels=(16, 16, 32, 32),
            norm_num_groups=8,
            cross_attention_dim=24,
            num_attention_heads=2,
            upcast_attention=False,
            ctrl_conditioning_embedding_out_channels=(4, 8),
            ctrl_block_out_channels=(4, 4, 8, 8),
            ctrl_num_attention_heads=2,
            ctrl_max_norm_num_groups=4,
        ),
        _unet_inputs(controlnet_cond=normal(2, 3, 2 * _SIZE, 2 * _SIZE)),
        **_COMMON,
        note="a UNet and its control network in one loop; down blocks return four values",
    ),
    Case(
        "DreamLiteUNetModel",
        "DreamLiteUNetModel",
        dict(
            sample_size=_SIZE,
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D",) * 2
            + ("DreamLiteCrossAttnDownBlock2D",) * 2,
            up_block_types=("DreamLiteCrossAttnUpBlock2D",) * 2
            + ("DreamLiteCrossAttnNoSelfAttnUpBlock2D", "DreamLiteUpBlock2D"),
            block_out_channels=(16, 16, 32, 32),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=24,
            attention_head_dim=8,
            ff_mult=2,
        ),
        _unet_inputs(),
        **_COMMON,
    ),
    Case(
        "Kandinsky3UNet",
        "Kandinsky3UNet",
        dict(
            in_channels=4,
            time_embedding_dim=16,
            groups=4,
            attention_head_dim=8,
            layers_per_block=2,
            block_out_channels=(8, 16, 32, 64),
            cross_attention_dim=24,
            encoder_hid_dim=24,
        ),
        _unet_inputs(encoder_attention_mask=ones(2, 6)),
        **_COMMON,
    ),
    Case(
        "AudioLDM2UNet2DConditionModel",
        "AudioLDM2UNet2DConditionModel",
        dict(
            sample_size=_SIZE,
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
            block_out_channels=(16, 16, 32, 32),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=((None, 24, None, 12),) * 4,
            attention_head_dim=2,
        ),
        _unet_inputs(encoder_hidden_states_1=normal(2, 4, 12)),
        **_COMMON,
        note="two text streams, each with cross-attentions of its own",
    ),
    Case(
        "UNet2DConditionModel-class",
        "UNet2DConditionModel",
        {**SD15, "layers_per_block": 1, "num_class_embeds": 10},
        _unet_inputs(class_labels=integers(10, 2)),
        **_COMMON,
        note="class labels are added to the time embedding",
    ),
]

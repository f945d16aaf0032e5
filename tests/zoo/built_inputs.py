"""Arguments of cases that depend on the model: made here, named in `cases.toml`."""

from functools import cache
from typing import Any

import torch

from tests.zoo.case import Inputs
from tests.zoo.draw import given, normal, ones, tensor, time

_Z_TOKENS = 64  # image and text tokens are each padded to a multiple of 32
_SIZE = 16  # latents of UNets


def z_image_control(model: Any, seed: int) -> dict[str, Any]:
    """Make residuals for two of the blocks, by their index."""
    generator = torch.Generator().manual_seed(seed + 1)
    width = model.config.dim
    return {
        "controlnet_block_samples": {
            index: 0.3 * torch.randn(2, _Z_TOKENS, width, generator=generator) for index in (0, 2)
        }
    }


def ltx2_refiner(model: Any, seed: int) -> dict[str, Any]:
    """Make arguments with positions as the model itself makes them."""
    made = given(
        hidden_states=normal(2, 32, 4),
        encoder_hidden_states=normal(2, 6, 24),
        timestep=time(2, 1),
        encoder_attention_mask=ones(2, 6),
    )(model, seed)
    made["video_rotary_emb"] = model.build_rotary_emb_for_absolute_positions(
        batch_size=2, frame_positions=[0, 1], height=4, width=4, device=torch.device("cpu"), fps=16.0
    )
    return made


def wan_animate_2(model: Any, seed: int) -> dict[str, Any]:
    """Make arguments with a cache that a first call has filled."""
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


def unet_control(model: Any, seed: int) -> dict[str, Any]:
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
        0.3 * torch.randn(2, width, side, side, generator=generator) for width, side in [*shapes, (channels[-1], size)]
    ]
    return {"down_block_additional_residuals": tuple(drawn[:-1]), "mid_block_additional_residual": drawn[-1]}


def unet_adapter(model: Any, seed: int) -> dict[str, Any]:
    """Make the residuals of a T2I adapter, one for each down block."""
    generator = torch.Generator().manual_seed(seed + 1)
    channels, size, drawn = model.config.block_out_channels, _SIZE, []
    for level, (kind, width) in enumerate(zip(model.config.down_block_types, channels, strict=True)):
        after = size // 2 if level < len(channels) - 1 else size
        side = size if "CrossAttn" in kind else after
        drawn.append(0.3 * torch.randn(2, width, side, side, generator=generator))
        size = after
    return {"down_intrablock_additional_residuals": drawn}


BUILT: dict[str, Inputs] = {
    "ltx2_refiner": ltx2_refiner,
    "unet_adapter": unet_adapter,
    "unet_control": unet_control,
    "wan_animate_2": wan_animate_2,
    "z_image_control": z_image_control,
}

"""Small FLUX transformers with random weights, for what depends on structure and not on pictures.

Nothing here says anything about quality: on random weights only counts and host time mean anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a small FLUX transformer and of its inputs.

    Attributes:
        double: Double-stream blocks.
        single: Single-stream blocks.
        heads: Attention heads of 16 channels.
        image_tokens: Tokens of the picture.
        text_tokens: Tokens of the prompt.
        batch: Samples in a call.
    """

    double: int = 19
    single: int = 38
    heads: int = 2
    image_tokens: int = 16
    text_tokens: int = 8
    batch: int = 1

    @property
    def width(self) -> int:
        """Channels of a stream."""
        return 16 * self.heads


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> FluxTransformer2DModel:
    """Build a transformer; the same shape gives the same weights in the blocks it has."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=shape.double,
        num_single_layers=shape.single,
        attention_head_dim=16,
        num_attention_heads=shape.heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    model = model.to(device) if dtype == model.dtype else model.to(device, dtype)
    return model.eval().requires_grad_(False)


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of one call, as `FluxPipeline` gives them."""
    generator = torch.Generator().manual_seed(1)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    places = torch.zeros(shape.image_tokens, 3)
    places[:, 2] = torch.arange(shape.image_tokens)
    return {
        "hidden_states": noise(shape.batch, shape.image_tokens, 16),
        "encoder_hidden_states": noise(shape.batch, shape.text_tokens, 32),
        "pooled_projections": noise(shape.batch, 32),
        "timestep": torch.full((shape.batch,), 0.5, device=device, dtype=dtype),
        "img_ids": places.to(device, dtype),
        "txt_ids": torch.zeros(shape.text_tokens, 3, device=device, dtype=dtype),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


class Constant(nn.Module):
    """A module that returns what another one returned."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value whatever is given."""
        return self.value


def hollow_out(model: nn.Module, paths: list[str], call: dict[str, Any]) -> None:
    """Replace modules by `Constant`s of what they return in a call; in place."""
    seen: dict[str, Any] = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, out, path=path: seen.__setitem__(path, out)
        )
        for path in paths
    ]
    model(**call)
    for hook in hooks:
        hook.remove()
    for path in paths:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, Constant(seen[path]))


@contextmanager
def emptied(model: nn.Module, keep: int = 0) -> Iterator[None]:
    """Take the blocks out of a FLUX transformer for a while.

    Without any, what is left is what every skipped step must do.

    Args:
        model: The transformer.
        keep: First double blocks to keep.
    """
    names = ("transformer_blocks", "single_transformer_blocks")
    kept = {name: getattr(model, name) for name in names}
    try:
        for name, left in zip(names, (keep, 0), strict=True):
            setattr(model, name, nn.ModuleList(list(kept[name])[:left]))
        yield
    finally:
        for name, blocks in kept.items():
            setattr(model, name, blocks)

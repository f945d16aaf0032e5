"""Small FLUX transformers with random weights, and the least that drives them as a pipeline does.

Nothing here says anything about quality: on random weights only counts and host time mean anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

import diffcache
from diffcache.features.base import Method


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


class Ticker:
    """The least that counts as a scheduler: it says how many steps there are, and when one ends."""

    def __init__(self) -> None:
        self.timesteps: range = range(0)

    def set_timesteps(self, steps: int) -> None:
        """Start a run."""
        self.timesteps = range(steps)

    def step(self) -> None:
        """End a step."""


class Loop:
    """A denoiser under a method, one step at a time, with the clock of a real pipeline.

    Args:
        model: A denoiser.
        method: What to wrap it with.
        call: Arguments of every call.
        steps: Length of a run.
    """

    def __init__(self, model: Any, method: Method, call: dict[str, Any], steps: int = 10**6) -> None:
        self.model, self.method, self.steps, self.arguments = model, method, steps, call
        self.scheduler = Ticker()
        self.components = {"transformer": model, "scheduler": self.scheduler}

    def __call__(self) -> None:
        """Do nothing; a pipeline can be called."""

    def __enter__(self) -> Loop:
        diffcache.wrap(self, self.method)
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        diffcache.unwrap(self)

    def restart(self) -> None:
        """Start a run."""
        self.scheduler.set_timesteps(self.steps)

    def call(self, branch: str = "cond") -> Any:
        """Make one denoiser call, as diffusers' pipelines do."""
        with self.model.cache_context(branch):
            return self.model(**self.arguments)

    def tick(self) -> None:
        """End the step."""
        self.scheduler.step()

    def take(self, steps: int, branches: tuple[str, ...] = ("cond",)) -> None:
        """Take some steps."""
        for _ in range(steps):
            for branch in branches:
                self.call(branch)
            self.tick()

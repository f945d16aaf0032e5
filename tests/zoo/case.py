"""One tiny random denoiser of the zoo: how to build it and what to feed it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Inputs = Callable[[nn.Module, int], dict[str, Any]]

_NORM_NAMES = ("gamma", "norm")
_TRAJECTORY_SEED = 7919


@dataclass(frozen=True)
class Case:
    """A diffusers denoiser class at a tiny size, with inputs that fit it.

    Attributes:
        name: Unique id: the class name, with a suffix where one class has several cases.
        cls: Name of the class in `diffusers`.
        config: Constructor arguments.
        inputs: Makes the forward arguments from (model, seed), in float32, batch 2 unless the
            note in the table says otherwise.
        timestep: Name of the forward argument that carries the timestep or sigma; empty where
            the class has none.
        span: Largest timestep in model units.
        rising: Whether the timestep grows towards the clean end, as it does for some classes.
        latents: Names of the forward arguments that change along a sampling trajectory.
        times: Further arguments that carry the same timestep.
        blocks: Names of the block lists of the model, each at least 4 long unless in `short`.
        short: Reason for each block list with fewer than 4 blocks.
        extras: Named variants (such as "controlnet") that make additional forward arguments.
    """

    name: str
    cls: str
    config: dict[str, Any]
    inputs: Inputs
    timestep: str = "timestep"
    span: float = 1000.0
    rising: bool = False
    latents: tuple[str, ...] = ("hidden_states",)
    times: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ("transformer_blocks",)
    short: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Inputs] = field(default_factory=dict)

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build the model in eval mode with every floating parameter drawn anew."""
        import diffusers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = getattr(diffusers, self.cls)(**self.config)
        randomize(model, seed)
        return model.to(dtype).eval()

    def kwargs(self, model: nn.Module, seed: int, step: int = 0, steps: int = 12) -> dict[str, Any]:
        """Make the forward arguments at one step of a sampling trajectory.

        The timestep falls (or rises, see `rising`) evenly over the steps, and the latents drift
        slowly in one fixed direction.
        """
        made = self.inputs(model, seed)
        done = step / steps
        time = self.span * (done if self.rising else 1.0 - done)
        for name in (self.timestep, *self.times):
            if name:
                made[name] = _with_time(made[name], time)
        generator = torch.Generator().manual_seed(seed + _TRAJECTORY_SEED)
        for name in self.latents:
            made[name] = _drift(made[name], 0.3 * done, generator)
        return made


def randomize(model: nn.Module, seed: int, gain: float = 0.8) -> nn.Module:
    """Draw every floating parameter of a model from a seeded normal distribution.

    Zero-initialized gates and heads come alive: matrices and kernels get a standard deviation of
    `gain / sqrt(inputs)`, norm weights 1 +- 0.1, other vectors 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = {id(m) for m in model.modules() if "norm" in type(m).__name__.lower()}
    with torch.no_grad():
        for module_name, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_floating_point():
                    continue
                noise = torch.randn(parameter.shape, generator=generator)
                is_norm = id(module) in norms or any(
                    word in f"{module_name.rpartition('.')[2]}.{name}" for word in _NORM_NAMES
                )
                if parameter.dim() >= 2:
                    fan_in = parameter[0].numel()
                    parameter.copy_(noise * gain / fan_in**0.5)
                elif is_norm and name in ("weight", "gamma", "scale"):
                    parameter.copy_(1.0 + 0.1 * noise)
                else:
                    parameter.copy_(0.1 * noise)
    return model


def output_tensors(out: Any) -> list[torch.Tensor]:
    """List the sample tensors of a forward's return value, main sample first."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        out = tuple(out.values())
    if isinstance(out, (tuple, list)):
        return [tensor for part in out for tensor in output_tensors(part)]
    if hasattr(out, "__dataclass_fields__"):
        return output_tensors(tuple(vars(out).values()))
    return []


def output_tensor(out: Any) -> torch.Tensor:
    """Return the main sample of a forward's return value as one tensor."""
    if isinstance(out, dict):
        out = next(iter(out.values()))
    elif isinstance(out, tuple):
        out = out[0]
    if isinstance(out, (list, tuple)):
        return torch.cat([tensor.flatten() for tensor in out])
    return output_tensors(out)[0]


def _with_time(like: Any, time: float) -> Any:
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, time if like.is_floating_point() else round(time))
    if isinstance(like, (list, tuple)):
        return type(like)(_with_time(part, time) for part in like)
    return type(like)(time)


def _drift(latents: Any, share: float, generator: torch.Generator) -> Any:
    if isinstance(latents, (list, tuple)):
        return type(latents)(_drift(part, share, generator) for part in latents)
    if latents.is_floating_point():
        return latents + share * torch.randn(latents.shape, generator=generator)
    order = torch.rand(latents.shape, generator=generator)
    return torch.where(order < share, latents.roll(1, -1), latents)

"""Round weights of the linear layers in modules that depend on the timestep alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.tree import Template, leaves
from diffcache.features.temporal_table import Rounded, rounded, step_of


@dataclass(frozen=True)
class Given:
    """A module's call, to be repeated after its run."""

    args: tuple[Any, ...]  # arguments by position, whose tensors are copies: later code may change the others
    kwargs: dict[str, Any]  # arguments by name, likewise
    cast: tuple[str, torch.dtype, bool]  # device type, dtype and state of automatic casts in the run

    @classmethod
    def of(cls, args: Any, kwargs: Any, device: str) -> Given:
        """Return a call as it is made now."""
        cast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.inference_mode(False):  # copies that may be used in any mode
            copies = [tensor.detach().clone() for tensor in leaves((args, kwargs))]
        copied_args, copied_kwargs = Template((args, kwargs)).build(copies)
        return cls(copied_args, copied_kwargs, cast)

    def repeat(self, module: nn.Module) -> Any:
        """Return what a module answers to the call, under the casts of the run."""
        with torch.autocast(*self.cast):
            return module(*self.args, **self.kwargs)


class RoundedLinear(nn.Module):
    """A linear layer with whole numbers for weights and a scale for every output.

    Args:
        layer: Layer to round, to the nearest; it is not held.
        bits: Bits of a weight.
        activations: Bits of an input, with one scale a call; None leaves inputs as they are.
    """

    def __init__(self, layer: nn.Linear, bits: int, activations: int | None = None) -> None:
        super().__init__()
        found = rounded(layer.weight, bits, step_of([layer.weight], bits, dim=1))
        self.register_buffer("codes", found.codes)
        self.register_buffer("step", found.step)
        self.dtype, self.bias = found.dtype, layer.bias
        self.bits, self.activations = bits, activations

    def given(self, value: Tensor) -> Tensor:
        """Return an input as the layer multiplies it."""
        if self.activations is None:
            return value
        return rounded(value, self.activations, step_of([value], self.activations)).value()

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output; the weights are made anew at every call."""
        codes, step = self.get_buffer("codes"), self.get_buffer("step")
        weight = Rounded(codes, step, self.dtype).value()
        return nn.functional.linear(self.given(value), weight, self.bias)

    def fit(self, weight: Tensor, given: Tensor) -> None:
        """Round a weight, float [O, K], anew, so that outputs for inputs, float [N, K], change little.

        Columns are rounded one after the other. What rounding one changes in the outputs, those
        that are still to be rounded take up as well as they can (GPTQ, arXiv 2210.17323, without
        its blocks and its order; scales stay those of the weight).
        """
        exact = torch.float32 if weight.device.type == "mps" else torch.float64
        step = self.get_buffer("step").to(exact)
        left, seen = (weight.detach() / step).to(exact), given.to(exact)
        moments = seen.T @ seen
        # Inputs of fewer steps than columns leave directions free. A little of the identity
        # decides there, for small changes.
        damping = 1e-4 * moments.diagonal().mean().clamp(min=1e-12)
        moments.diagonal().add_(damping)
        inverse = torch.linalg.inv(moments)
        upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
        most = 2 ** (self.bits - 1) - 1
        codes = torch.empty_like(left)
        for column in range(left.shape[1]):
            codes[:, column] = left[:, column].round().clamp(-most, most)
            missed = (left[:, column] - codes[:, column]) / upper[column, column]
            left[:, column + 1 :] -= torch.outer(missed, upper[column, column + 1 :])
        self.register_buffer("codes", codes.to(self.get_buffer("codes").dtype))


def rounded_copy(module: nn.Module, bits: int, activations: int | None = None) -> nn.Module:
    """Return a copy of a module in which every `nn.Linear` is a `RoundedLinear`."""
    if type(module) is nn.Linear:
        return RoundedLinear(copy.deepcopy(module), bits, activations)
    made = copy.deepcopy(module)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundedLinear(child, bits, activations))
    return made


def reconstruct(layer: nn.Module, source: nn.Module, calls: list[Given]) -> None:
    """Round the linear layers of what `rounded_copy` made of a module anew, for some calls of the module.

    They are taken in the order in which they are called, so that each is given what the ones before
    it return with rounded weights.
    """
    linears = {name: m for name, m in layer.named_modules() if isinstance(m, RoundedLinear)}
    for name in _inputs(layer, linears, calls):
        linear = linears[name]
        given = _inputs(layer, {name: linear}, calls)[name]
        linear.fit(source.get_submodule(name).get_parameter("weight"), torch.cat(given))


def _inputs(layer: nn.Module, linears: dict[str, RoundedLinear], calls: list[Given]) -> dict[str, list[Tensor]]:
    """Return inputs of linear layers in some calls of a module, float [N, K], in their order."""
    found: dict[str, list[Tensor]] = {}

    def keep(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, RoundedLinear)
        name = next(name for name, one in linears.items() if one is linear)
        value = linear.given(args[0])
        found.setdefault(name, []).append(value.reshape(-1, value.shape[-1]))

    hooks = [linear.register_forward_pre_hook(keep) for linear in linears.values()]
    try:
        for call in calls:
            call.repeat(layer)
    finally:
        for hook in hooks:
            hook.remove()
    return found

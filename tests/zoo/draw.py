"""Short words for the forward arguments of a case: what to draw, and how large."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Inputs


@dataclass(frozen=True)
class Draw:
    """An argument that is made when the inputs are, from their generator."""

    make: Callable[[torch.Generator], Any]


def normal(*shape: int, scale: float = 1.0) -> Draw:
    """Draw a standard normal tensor of this shape, times `scale`."""
    return Draw(lambda generator: scale * torch.randn(shape, generator=generator))


def integers(high: int, *shape: int) -> Draw:
    """Draw integers in [0, high)."""
    return Draw(lambda generator: torch.randint(0, high, shape, generator=generator))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Draw:
    """Make a tensor of ones."""
    return Draw(lambda _: torch.ones(shape, dtype=dtype))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Draw:
    """Make a tensor of zeros."""
    return Draw(lambda _: torch.zeros(shape, dtype=dtype))


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Draw:
    """Make a tensor of given values."""
    return Draw(lambda _: torch.tensor(values, dtype=dtype))


def time(*shape: int, at: float = 500.0) -> Draw:
    """Make a floating timestep; without a shape one value for each of the two samples."""
    return Draw(lambda _: torch.full(shape or (2,), at))


def long_time(*shape: int, at: int = 500) -> Draw:
    """Make an integer timestep; without a shape one value for each of the two samples."""
    return Draw(lambda _: torch.full(shape or (2,), at, dtype=torch.long))


def grid_ids(*sizes: int, axes: int = 3) -> Draw:
    """Make the position ids of a grid, flattened to [tokens, axes]; leading axes are zero.

    Args:
        *sizes: Size of each of the last axes.
        axes: Number of axes in all.
    """

    def make(_: torch.Generator) -> torch.Tensor:
        grid = torch.stack(torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij"))
        ids = torch.zeros(grid[0].numel(), axes)
        ids[:, axes - len(sizes) :] = grid.flatten(1).T.float()
        return ids

    return Draw(make)


def pair(*draws: Draw) -> Draw:
    """Make a tuple of several draws."""
    return Draw(lambda generator: tuple(draw.make(generator) for draw in draws))


def literal(value: Any) -> Draw:
    """Hand over a value that TOML cannot write."""
    return Draw(lambda _: value)


def given(**specs: Any) -> Inputs:
    """Turn argument specifications into the `inputs` of a case.

    Args:
        **specs: A `Draw` for each random or tensor argument, plain values for the others; lists,
            tuples and dictionaries are searched for draws.

    Returns:
        A function of (model, seed) that makes the arguments anew on each call.
    """

    def inputs(model: nn.Module, seed: int) -> dict[str, Any]:
        del model
        generator = torch.Generator().manual_seed(seed)
        return {name: _resolve(spec, generator) for name, spec in specs.items()}

    return inputs


def residuals(tokens: int, width: int, **counts: int) -> Inputs:
    """Make ControlNet residuals: for each argument, so many tensors [2, tokens, width].

    Args:
        tokens: Length of the stream the residuals are added to.
        width: Channels of the stream.
        **counts: Number of residuals for each forward argument.
    """

    def make(model: nn.Module, seed: int) -> dict[str, Any]:
        del model
        generator = torch.Generator().manual_seed(seed + 1)
        return {
            name: [0.3 * torch.randn(2, tokens, width, generator=generator) for _ in range(count)]
            for name, count in counts.items()
        }

    return make


def _resolve(spec: Any, generator: torch.Generator) -> Any:
    if isinstance(spec, Draw):
        return spec.make(generator)
    if isinstance(spec, dict):
        return {key: _resolve(value, generator) for key, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(_resolve(value, generator) for value in spec)
    return spec


# What the strings of `cases.toml` may call and name.
WORDS: dict[str, Any] = {
    word.__name__: word
    for word in (
        normal, integers, ones, zeros, tensor, time, long_time, grid_ids, pair, literal, residuals,
        list, range,
    )
} | {"bool": torch.bool, "long": torch.long}  # fmt: skip


def read(value: Any) -> Any:
    """Return what a value of `cases.toml` stands for: calls are made, "None" is None.

    Tables and arrays are read through.
    """
    if isinstance(value, dict):
        return {name: read(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(read, value))
    if isinstance(value, str) and value.partition("(")[0] in WORDS:
        return eval(value, {"__builtins__": {}, **WORDS})
    return None if value == "None" else value

"""Rows of measurements of kernels: shapes, bytes and the ways to the same result."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffcache.registry import rows_of

SIZES = {"FLUX.1-dev": (4608, 3072), "Wan2.1-1.3B": (4680, 1536)}  # tokens and channels


@dataclass(frozen=True)
class KernelCase:
    """One operator at the sizes of one model.

    Attributes:
        operator: Name in `torch.ops.diffcache`.
        model: Whose sizes these are.
        shapes: Shapes and settings, as a reader of the table needs them.
        make: Takes a device and whether sizes are tiny, and returns what the ways are called with:
            random numbers, a fresh set at every call.
        ways: Name -> how the same result is had. `kernel` calls the operator, `plain` its twin;
            others are rivals. Each returns its results.
        moved: Least bytes that are read and written, at the sizes of the model.
        flops: Operations of products of matrices, at the sizes of the model.
        tolerance: Largest error of a way, as a norm relative to `plain`.
        target: Aims of the kernel: name of another way -> times as fast, `limit` -> share
            of the bandwidth of a copy.
        instead: The way that the library goes where the kernel does not run; a kernel is chosen
            where it is faster than that.
    """

    operator: str
    model: str
    shapes: str
    make: Callable[[torch.device, bool], tuple[Any, ...]]
    ways: dict[str, Callable[..., Any]]
    moved: int
    flops: int = 0
    tolerance: float = 2e-2
    target: dict[str, float] = field(default_factory=dict)
    instead: str = "plain"


def tensors(count: int, shape: tuple[int, int]) -> Callable[[torch.device, bool], tuple[Tensor, ...]]:
    """Return a function that draws random tensors of a shape, or of a tiny one, in bfloat16."""

    def make(device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        size = (8, 64) if tiny else shape
        return torch.randn(count, *size, device=device, dtype=torch.bfloat16).unbind()

    return make


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch compiles at its first call; importing its compiler is slow."""
    made: list[Callable[..., Any]] = []

    def call(*given: Any) -> Any:
        if not made:
            made.append(torch.compile(run))
        return made[0](*given)

    return call


def all_cases() -> list[KernelCase]:
    """Return the rows of all operators, in the order of their families in the registry."""
    names = dict.fromkeys(row.family for row in rows_of("kernel").values())
    modules = [importlib.import_module(f"diffcache.eval.kernels.{name}") for name in names]
    return [case for module in modules for case in module.cases()]

"""Calls of every operator, which `families` lists, and how results are compared."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels.dispatch import Operator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """One call of an operator.

    Attributes:
        name: For the id of a test.
        operator: What is called.
        args: What it is given.
        exact: Takes the arguments with float64 in the place of floats, and returns all results,
            those that are written in place among them.
        results: Takes the arguments and the returned value, and returns all results.
        tolerance: Factor of what rounding the exact result once takes away.
    """

    name: str
    operator: Operator
    args: tuple[Any, ...]
    exact: Callable[..., list[Tensor]]
    results: Callable[[tuple[Any, ...], Any], list[Tensor]] = lambda args, out: [out]
    tolerance: float = 1.1


def copied(tree: Any, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """Return arguments with every tensor changed, copied by default."""
    if isinstance(tree, Tensor):
        return change(tree)
    return type(tree)(copied(each, change) for each in tree) if isinstance(tree, (list, tuple)) else tree


def wide(tree: Any) -> Any:
    """Return arguments with float64 in the place of other floats."""
    return copied(tree, lambda t: t.double() if t.is_floating_point() else t)


def off(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of what is exact."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def floor(exact: Tensor, dtype: torch.dtype) -> float:
    """Return the error of what is exact, rounded once."""
    return off(exact.to(dtype), exact)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random numbers with NaN before and after them in memory."""
    count = math.prod(shape)
    room = torch.full((count + 128,), math.nan, dtype=dtype)
    fill = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    room[64:-64] = fill.to(dtype)
    return room[64:-64].view(shape)


def cases(dtype: torch.dtype) -> list[Case]:
    """Return the cases of a dtype: all of float32, every third one of bfloat16, two of float16."""
    files = sorted(Path(__file__).with_name("families").glob("*.py"))
    modules = [importlib.import_module(f"tests.kernels.families.{file.stem}") for file in files]
    taken = {torch.bfloat16: slice(None, None, 3), torch.float16: slice(2)}.get(dtype, slice(None))
    return [c for module in modules for family in module.FAMILIES for c in [*family(dtype)][taken]]


def check(case: Case, found: Any, args: tuple[Any, ...], before: tuple[Any, ...]) -> None:
    """Compare results with what is exact."""
    exact = case.exact(*wide(before))
    results = case.results(args, found)
    assert len(results) == len(exact)
    for one, other in zip(results, exact, strict=True):
        assert one.shape == other.shape
        if not one.is_floating_point():
            assert torch.equal(one, other.to(one.dtype))
            continue
        least = max(floor(other, one.dtype), torch.finfo(one.dtype).eps / 5)
        limit = max(case.tolerance * least, 1.5e-7)
        assert off(one, other) <= limit, (case.name, off(one, other), limit)

"""Floating-point operations of a run: counted in a real call, less those that a cache saved.

A multiply-add is two operations. Matrix products, convolutions and attention are counted, as
`torch.utils.flop_counter` does, with the attention kernel of the CPU, which it leaves out before torch 2.15;
element-wise work and kernels of other libraries are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import diffcache
from diffcache.anchor import owner_of
from diffcache.attach.flop_counter import counted


@dataclass
class Tally:
    """Calls and operations of the modules under `counting`."""

    # Name and operations of every call in order; None where they could not be counted
    calls: list[tuple[str, float | None]] = field(default_factory=list)

    @property
    def total(self) -> float | None:
        """Operations of all calls; None if there were none, or one could not be counted."""
        known = [flops for _, flops in self.calls if flops is not None]
        return sum(known) if known and len(known) == len(self.calls) else None


@dataclass
class Counted(Tally):
    """The denoiser's operations in one uncached run, embedders and heads included."""

    steps: int = 1  # sampling steps, each with as many calls as there are guidance branches

    @property
    def per_step(self) -> float | None:
        """Operations of one step, all guidance branches together; of two denoisers the mean."""
        return None if self.total is None else self.total / self.steps


class _Whole(nn.Module):
    """A module by its unchanged forward, so that hooks on the module itself run once."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.original = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


@contextmanager
def counting(modules: Mapping[str, nn.Module]) -> Iterator[Tally]:
    """Count the operations of every call of some modules; one may lie inside another.

    Args:
        modules: Modules by the name that the tally gives them.
    """
    tally = Tally()
    before = {name: module.__dict__.get("forward") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.forward = _counting_forward(tally, name, module)
        yield tally
    finally:
        for name, module in modules.items():
            old = before[name]
            if old is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = old


def _counting_forward(tally: Tally, name: str, module: nn.Module) -> Callable[..., Any]:
    original = module.forward
    whole = _Whole(module, original)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        out, flops = counted(whole, args, kwargs)
        tally.calls.append((name, flops))
        return out

    return forward


def count(target: Any, call: Mapping[str, Any]) -> Counted:
    """Call a pipeline or a denoiser uncached, and count the operations of its denoiser calls.

    Args:
        target: A diffusers pipeline, or a denoiser.
        call: Arguments of the call; two sampling steps are enough.

    Raises:
        AttachError: If the target has no denoiser.
        ValueError: If it runs under a cache, or the call reached no denoiser.
    """
    modules = denoisers(target)
    cached = next((name for name, module in modules.items() if owner_of(module)), None)
    if cached is not None:
        raise ValueError(f"{cached} runs under a cache; count it uncached: diffcache.unwrap first")
    with torch.no_grad(), counting(modules) as tally, _steps(target) as steps:
        target(**call)
    if not tally.calls:
        raise ValueError(f"the call of {type(target).__name__} reached none of {', '.join(modules)}")
    number = len(steps) or int(call.get("num_inference_steps") or len(tally.calls))
    return Counted(tally.calls, number)


def denoisers(target: Any) -> dict[str, nn.Module]:
    """Return the denoisers of a pipeline by name; a bare one is called `model`.

    Raises AttachError if there are none.
    """
    if isinstance(target, nn.Module):
        return {"model": target}
    return {name: target.components[name] for name in diffcache.inspect(target)}


@contextmanager
def _steps(target: Any) -> Iterator[list[None]]:
    """Collect one entry for every step of a pipeline's scheduler."""
    taken: list[None] = []
    scheduler = getattr(target, "scheduler", None)
    original = getattr(scheduler, "step", None)
    if scheduler is None or original is None:
        yield taken
        return

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        taken.append(None)
        return original(*args, **kwargs)

    before = vars(scheduler).get("step")
    scheduler.step = step
    try:
        yield taken
    finally:
        del scheduler.step
        if before is not None:
            scheduler.step = before

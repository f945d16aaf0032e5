"""The caches that diffusers has itself, set to skip as many steps as ours, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import TaylorSeerCacheConfig
from torch import Tensor, nn


def taylor_schedule(interval: int, before: int, steps: int) -> list[int]:
    """Return the steps that diffusers' TaylorSeer computes.

    After `before` steps it predicts one step and only then starts to count: interval 4, before 3
    is C C C P C P P P C.
    """
    return [s for s in range(steps) if s < before or (s - before - 1) % interval == 0]


def taylor_config(
    computed: int, steps: int, lite: bool, dtype: torch.dtype
) -> TaylorSeerCacheConfig:
    """Return a TaylorSeer of diffusers that computes about as many steps as wanted.

    Args:
        computed: Wanted number of computed steps.
        steps: Steps of the run.
        lite: Whether to keep the head's output only, instead of every attention output.
        dtype: Of the kept tensors.
    """
    before = min(3, computed)
    distance = {
        n: abs(len(taylor_schedule(n, before, steps)) - computed) for n in range(1, steps + 1)
    }
    interval = min(distance, key=lambda n: (distance[n], n))
    return TaylorSeerCacheConfig(
        cache_interval=interval, disable_cache_before_step=before, max_order=1,
        taylor_factors_dtype=dtype, use_lite_mode=lite,
    )  # fmt: skip


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors in the states of a model's diffusers hooks."""
    storages: dict[int, int] = {}
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            kept = getattr(getattr(hook, "state_manager", None), "_state_cache", {})
            states = [*kept.values(), *([hook.state] if hasattr(hook, "state") else [])]
            for tensor in _tensors([vars(state) for state in states]):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def threshold_for(
    computed: int,
    count: Callable[[float], int],
    low: float = 1e-3,
    high: float = 2.0,
    tries: int = 8,
) -> float:
    """Return the threshold at which a gate computes about as many steps as wanted.

    Args:
        computed: Wanted number of computed steps.
        count: Runs the gate at a threshold and returns how many steps it computed.
        low: Threshold that computes too many.
        high: Threshold that computes too few.
        tries: Thresholds to try.

    Returns:
        The best of the thresholds tried, to three digits.
    """
    best, distance = high, float("inf")
    for _ in range(tries):
        middle = float(f"{(low * high) ** 0.5:.3g}")
        found = count(middle)
        if abs(found - computed) < distance:
            best, distance = middle, abs(found - computed)
        if found == computed:
            break
        low, high = (middle, high) if found > computed else (low, middle)
    return best

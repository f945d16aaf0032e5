"""Timesteps as numbers, for the clock of a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def timestep_value(timestep: Any) -> float | None:
    """Return a timestep as a number; waits for the device; the largest of several."""
    if isinstance(timestep, Tensor):
        if timestep.numel() > 1:
            timestep = timestep.max()
        return float(timestep.item()) if timestep.numel() else None
    if isinstance(timestep, (list, tuple)):
        return timestep_value(timestep[0]) if timestep else None
    return None if timestep is None else float(timestep)


def clock_value(timestep: Any) -> float | None:
    """Return a number that changes whenever a timestep does; waits for the device.

    The mean of several: where every frame or token has its own, they need not all move.
    """
    if isinstance(timestep, Tensor):
        return float(timestep.detach().cpu().double().mean()) if timestep.numel() else None
    if isinstance(timestep, (list, tuple)):
        values = [value for value in map(clock_value, timestep) if value is not None]
        return sum(values) / len(values) if values else None
    return None if timestep is None else float(timestep)


def cheap_value(timestep: Any) -> float | None:
    """Return a timestep as a number if no device has to be waited for, else None."""
    if isinstance(timestep, Tensor) and timestep.device.type != "cpu":
        return None
    return timestep_value(timestep)

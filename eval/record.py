"""Benchmark records: what was measured, with what, on what, and how much it scattered."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
REQUIRED = ("schema", "benchmark", "versions", "device", "threads", "dtype", "shapes", "command",
            "date", "commit", "rounds", "rows")  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Setting:
    """Where and in what precision to measure.

    Attributes:
        device: Torch device.
        dtype: Of the models.
        quick: Whether to measure as little as shows that it works.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    quick: bool = False

    def wait(self) -> None:
        """Let an accelerator finish."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def device_name(self) -> str:
        """Name of the accelerator or of the processor."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return _processor()


def stats(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return median, quartiles, 10th percentile and number of samples, times `scale`."""
    ordered = sorted(value * scale for value in samples)
    return {
        "median": _quantile(ordered, 0.5),
        "q1": _quantile(ordered, 0.25),
        "q3": _quantile(ordered, 0.75),
        "p10": _quantile(ordered, 0.1),
        "n": len(ordered),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

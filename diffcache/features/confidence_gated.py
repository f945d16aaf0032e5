"""Forecast the last block while the first block's forecast holds (confidence-gated Taylor)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffcache.features.base import check_int
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Taylor, check_order
from diffcache.features.parts.when import Gate


@dataclass(frozen=True)
class ConfidenceGatedTaylor(FeatureMethod):
    """Forecast the stack's output as long as a forecast of the first block proves right.

    The first block always runs in the deciding branch. Its output is forecast from the steps
    computed before; if the relative L1 error of that forecast, `mean|forecast - output| /
    mean|output|`, is below `threshold`, the output of the last block is forecast too and the
    blocks between are skipped. The first `warmup` steps and the last are always computed.
    Reference: Forecasting When to Forecast, arXiv 2508.02240, with the schedule of the official
    code, whose gate opens after step `warmup - 1`.

    Args:
        threshold: Largest relative error that still skips; 0 turns the cache off. Dimensionless;
            0.03 (quality) to 0.13 (fast) on FLUX, 0.12 on HunyuanVideo, 0.36 on Wan.
        order: Order of the last block's forecast, 0 to 4.
        probe_order: Order of the first block's forecast, 0 to 4.
        warmup: First steps that are always computed, at least 1.
        start: First step index at which differences are taken (`first_enhance - 1` of the
            official code).

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> pipe = diffcache.wrap(pipe, ConfidenceGatedTaylor(threshold=0.05))  # doctest: +SKIP
    """

    name: ClassVar[str] = "confidence-gated-taylor"

    threshold: float = 0.13
    order: int = 1
    probe_order: int = 1
    warmup: int = 5
    start: int = 2

    def __post_init__(self) -> None:
        check_order("probe_order", self.probe_order)
        check_int("start", self.start, 0)
        self.parts()

    def parts(self) -> Combine:
        """Return a gate on the first block's forecast, and a forecast of the last block."""
        gate = Gate(
            self.threshold,
            self.warmup,
            of="output",
            forecast=Taylor(self.probe_order, self.start),
            relative_to="probe",
            last=True,
        )
        return Combine(gate, Taylor(self.order, self.start), lead=1, feature="output")

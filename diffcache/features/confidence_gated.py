"""Forecast the last block while the first block's forecast holds (confidence-gated Taylor)."""

from __future__ import annotations

from dataclasses import dataclass

from diffcache.features.base import Change, Order, Warmup
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Taylor
from diffcache.features.parts.when import Gate
from diffcache.ranges import Whole


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
    """

    threshold: Change = 0.13
    order: Order = 1
    probe_order: Order = 1
    warmup: Warmup = 5
    start: Whole = 2

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

"""Rows of the table of causal video: policies under their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffcache import video

Role = Literal["stock", "cache", "control"]


@dataclass(frozen=True)
class Row:
    """A policy under a name."""

    name: str  # name in the table
    policy: video.VideoPolicy  # frames that are held
    role: Role = "cache"  # `stock`, the first row; `cache`; or `control`, which must lose


# Windows are whole chunks of three latent frames; sticker-causal was trained on seven chunks.
ROWS = (
    Row("full history", video.FullHistory(), "stock"),
    Row("one frame", video.Window(1, 0), "control"),
    Row("window 6", video.Window(6, 0)),
    Row("window 6, 3 sinks", video.Window(6, 3)),
    Row("window 12, 3 sinks", video.Window(12, 3)),
    Row("Infinity-RoPE, as released", video.InfinityRoPE()),
    Row("Deep Forcing", video.DeepForcing(window=15, sinks=6, budget=12, recent=4)),
    Row("EMA-Sink", video.EMASink(6, 3)),
    Row("StreamDiffusionV2", video.StreamDiffusionV2(6, 3, back=9)),
    Row("FlowCache", video.FlowCache(9)),
    Row("Rolling Sink", video.RollingSink(sinks=9, recent=3)),
    Row("history retrieval", video.HistoryRetrieval(6, 12, sinks=3)),
    Row("semantic bank", video.SemanticBank(6, 12, sinks=3, count=3)),
    Row("layer budgets", video.LayerBudgets(12, sinks=3)),
    Row("window 12, 3 sinks, KIVI 2 bits", video.Quantized(video.Window(12, 3), 2)),
)

"""Rows of the table of causal video: policies, and how a change of the prompt meets the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffcache import video

Role = Literal["stock", "cache", "control"]


@dataclass(frozen=True)
class Row:
    """A policy under a name.

    Attributes:
        name: Name in the table.
        policy: Frames that are held.
        role: `stock`, the first row; `cache`; or `control`, which must lose.
    """

    name: str
    policy: video.VideoPolicy
    role: Role = "cache"


@dataclass(frozen=True)
class Change:
    """A way to change the prompt.

    Attributes:
        name: Name in the table.
        policy: Frames that are held.
        mode: Treatment of those frames.
    """

    name: str
    policy: video.VideoPolicy
    mode: video.Switch


# Windows are whole chunks of three frames. What holds twelve frames and three sinks holds as many
# frames as the model was trained with at most.
ROWS = (
    Row("full history", video.FullHistory(), "stock"),
    Row("one frame", video.Window(1, 0), "control"),
    Row("window 3", video.Window(3, 0)),
    Row("window 6", video.Window(6, 0)),
    Row("window 12", video.Window(12, 0)),
    Row("window 3, 3 sinks", video.Window(3, 3)),
    Row("window 6, 3 sinks", video.Window(6, 3)),
    Row("window 12, 3 sinks", video.Window(12, 3)),
    Row("window 6, 3 sinks, own numbers", video.Window(6, 3, "absolute")),
    Row("Infinity-RoPE, as released", video.InfinityRoPE()),
    Row("Infinity-RoPE, horizon 24", video.InfinityRoPE(6, 3, "horizon", 24)),
    Row("Deep Forcing", video.DeepForcing(window=15, sinks=6, budget=12, recent=4)),
    Row("EMA-Sink", video.EMASink(6, 3)),
    Row("StreamDiffusionV2", video.StreamDiffusionV2(6, 3, back=9)),
    Row("FlowCache", video.FlowCache(9)),
    Row("Rolling Sink", video.RollingSink(sinks=9, recent=3)),
    Row("history retrieval", video.HistoryRetrieval(6, 12, sinks=3)),
    Row("window 12, 3 sinks, KIVI 4 bits", video.Quantized(video.Window(12, 3), 4)),
    Row("window 12, 3 sinks, KIVI 2 bits", video.Quantized(video.Window(12, 3), 2)),
)

CHANGES = tuple(
    Change(f"{where}, {mode}", policy, make)
    for where, policy in (
        ("full history", video.FullHistory()), ("window 6, 3 sinks", video.Window(6, 3))
    )
    for mode, make in (
        ("keep", video.Keep()), ("flush", video.Flush()),
        ("re-cache", video.Recache(9)), ("cut", video.Cut()),
    )
)  # fmt: skip

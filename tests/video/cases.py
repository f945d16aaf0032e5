"""The policies that are tested, at the size of the toys: one place to add to."""

from __future__ import annotations

from diffcache.video import (
    Ca2VDM,
    DeepForcing,
    EMASink,
    FlowCache,
    FullHistory,
    HistoryRetrieval,
    InfinityRoPE,
    Quantized,
    RollingSink,
    StreamDiffusionV2,
    VideoPolicy,
    Window,
)

POLICIES: dict[str, VideoPolicy] = {
    "window": Window(3, 3),
    "infinity-rope": InfinityRoPE(3, 1),
    "horizon": InfinityRoPE(3, 1, "horizon", 5),
    "deep-forcing": DeepForcing(9, 3, 8, 4, max_reuse=2),
    "ema-sink": EMASink(3, 3, 0.5),
    "flow-cache": FlowCache(4, recent=4),
    "rolling-sink": RollingSink(6, 3),
    "history-retrieval": HistoryRetrieval(3, 4, count=2),
}
# What they hold grows, is coded, is thrown away on purpose, or is of another transformer: each has
# tests of its own.
APART = (FullHistory, Quantized, StreamDiffusionV2, Ca2VDM)

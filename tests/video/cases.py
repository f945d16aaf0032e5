"""The policies that are tested, at the size of the toys: with `skips` of their rows, and others."""

from diffcache.registry import rows_of
from diffcache.video import InfinityRoPE, VideoPolicy, make_policy

POLICIES: dict[str, VideoPolicy] = {
    name: make_policy(name, **row.skips) for name, row in rows_of("video").items() if row.skips is not None
} | {"horizon": InfinityRoPE(3, 1, "horizon", 5)}
# What they hold grows, is coded, is thrown away on purpose, or is of another transformer: each has
# tests of its own.
APART = {"full", "quantized", "stream-diffusion-v2", "ca2-vdm"}

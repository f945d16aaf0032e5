"""DPad: most masks after the active block are left out, the more the further away."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.state import RowState, State
from diffcache.ranges import Count, NotNegative, Whole


@dataclass(frozen=True)
class DPad(Policy):
    """Leave masks after the active block out of sight and uncomputed, by chance that grows.

    For each block, a mask at distance d of a window after it is kept with a probability of `scale`
    times the standard normal density at `sigma * d / (window - 1)`; none beyond is. The others are
    neither computed nor seen until the next block, which draws anew. Goes with the caches of
    Fast-dLLM, which compute all that is kept at the first step of a block.

    Departures: the very first forward computes what it hides, so that something is held of every
    position. Draws depend on the block and the distance alone, so that a batch is its prompts
    alone; the published code draws from a generator that goes on. Its early end at the end token is
    `Schedule(eos_id=...)`.

    Args:
        window: Masks after a block that may be kept.
        sigma: Standard deviations that the window is long.
        scale: Factor of the density.
        cache: `none` computes all that is kept at every step, `prefix` the block and the masks
            after it, `dual` the block alone.
        seed: Seed of the draws.

    Reference: DPad, arXiv 2508.14148, and its released code.
    """

    window: Count = 256
    sigma: NotNegative = 4.0
    scale: NotNegative = 2.0
    cache: Literal["none", "prefix", "dual"] = "none"
    seed: Whole = 0

    def plan(self, state: State) -> RowPlan:
        """Return what is kept, or of it the block and what follows, seeing what is kept."""
        kept = torch.stack([_kept(self, row.block, state.width) for row in state.rows])
        stops = torch.tensor([[row.stop] for row in state.rows])
        distance = torch.arange(state.width) - stops
        seen = (distance < 0) | kept.gather(1, distance.clamp_min(0))  # on the host, as draws are
        shown = None if bool(seen.all()) else seen.to(state.ids.device)

        def run_of(row: RowState) -> range:
            if row.step == 0 or self.cache == "none":
                return range(state.width)
            return range(row.start, row.stop if self.cache == "dual" else state.width)

        if state.last is None:
            return replace(ALL, seen=shown)
        if shown is None:
            return state.runs(run_of)
        return replace(state.plan(state.each(run_of) & shown), seen=shown)


@lru_cache(maxsize=1024)
def _kept(policy: DPad, block: int, width: int) -> Tensor:
    """Return which masks after a block are kept, by their distance from it, bool `[width]`."""
    generator = torch.Generator().manual_seed(policy.seed * 1_000_003 + block)
    chance = torch.rand(policy.window, dtype=torch.float64, generator=generator)
    at = torch.linspace(0, policy.sigma, policy.window, dtype=torch.float64)
    density = policy.scale * torch.exp(-at.square() / 2) / math.sqrt(2 * math.pi)
    kept = chance < density
    return functional.pad(kept, (0, max(width - policy.window, 0)))[:width]

"""Vicinity refresh: what lies around the active block is computed along with it."""

from __future__ import annotations

from dataclasses import dataclass

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import RowState, State
from diffcache.ranges import Count, Whole


@dataclass(frozen=True)
class Vicinity(Policy):
    """Compute the active block with some tokens before and after it; all at refreshes.

    Tokens next to a block change most while it is decoded. The first `warmup` forwards of a
    decoding and the one after them compute all rows, then the first one of each block, or in blocks
    after the first one forward in `every`.

    Departures: the published code computes the window right after a refresh, even where that
    decided the last mask of the block; here a block that is decided has no further forward.
    Sequences of a batch have blocks of their own; the code is for one. Its smoothing of embeddings
    over steps is left out. Its decoders are rules of the sampler: `Threshold` and `Hierarchical`.

    Args:
        before: Tokens before the block that are computed along with it.
        after: Tokens after the block that are computed along with it.
        every: Forwards of the decoding from one refresh to the next; None for the first forward of
            each block.
        warmup: Forwards at the start that compute all rows, besides the first refresh.

    Reference: dInfer, arXiv 2510.08666, and its released code (`VicinityCacheIteration`), read and
    not run.
    """

    before: Whole = 16
    after: Whole = 16
    every: Count | None = None
    warmup: Whole = 4

    def plan(self, state: State) -> RowPlan:
        """Return all rows at a refresh, else the block and what is around it."""

        def run_of(row: RowState) -> range:
            is_due = row.step == 0 if self.every is None else state.step % self.every == 0
            if state.step <= self.warmup or (is_due and row.block > 0):
                return range(state.width)
            return range(max(row.start - self.before, 0), min(row.stop + self.after, state.width))

        return state.runs(run_of)

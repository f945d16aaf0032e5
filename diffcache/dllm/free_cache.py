"""FreeCache: finished blocks are frozen for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import RowState, State


@dataclass(frozen=True)
class FreeCache(Policy):
    """Compute the active block and all masks after it; never what lies before.

    As released, the tokens of a block's last commit are frozen with the keys and values of their
    masks, since no later forward computes them. With `commit`, the first forward of every block
    computes the block before it once more.

    Departure: the paper's commit is none; other decoders make it a forward of its own. Here it is
    merged with the next block's first forward, which computes as many rows and saves a forward.

    Args:
        commit: Whether a finished block is computed once more before it is frozen.

    Reference: FlashDLM (FreeCache), arXiv 2505.21467, section 3.
    """

    is_local: ClassVar[bool] = True

    commit: bool = False

    def plan(self, state: State) -> RowPlan:
        """Return all rows at first, then those from the active block on."""

        def run_of(row: RowState) -> range:
            if state.step == 0:
                return range(state.width)
            again = self.commit and row.step == 0 and row.block > 0
            return range(row.start - (row.stop - row.start) * again, state.width)

        return state.runs(run_of)

"""Fast-dLLM: keys and values are computed anew at the start of every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import RowState, State


@dataclass(frozen=True)
class FastDLLM(Policy):
    """Keep what lies before the block, and with `dual` what lies after it, from its first step.

    The paper's parallel decoding is a rule of the sampler: `Threshold` or `Factor`.

    In models whose attention is causal over blocks, `dual` with blocks that divide those is the
    sub-block cache of Fast-dLLM v2: the block of attention is computed whole as long as the first
    token of the sub-block is a mask, then the sub-block alone.

    Departures: sequences of a batch have blocks of their own; the published code is for one. That
    of v2 ignores a prompt of exactly one block, and takes the most probable token for the first
    one of a block at any temperature.

    Args:
        dual: Whether steps after the first of a block compute the block alone (DualCache), instead
            of the block and all masks after it (PrefixCache).

    Reference: Fast-dLLM, arXiv 2505.22618, section 3.2; Fast-dLLM v2, arXiv 2509.26328, section
    3.3, and its released code.
    """

    is_local: ClassVar[bool] = True

    dual: bool = False

    def plan(self, state: State) -> RowPlan:
        """Return all rows at the start of a block, then the block or the block and what follows."""
        waiting = self._waiting(state)

        def run_of(row: RowState) -> range:
            if row.step == 0 or id(row) in waiting:
                return range(state.width)
            return range(row.start, row.stop if self.dual else state.width)

        return state.runs(run_of)

    def _waiting(self, state: State) -> set[int]:
        """Return which sequences' blocks wait for the row before them, in blocks of attention."""
        if not (state.shift and self.dual and any(row.span for row in state.rows)):
            return set()
        starts = [[min(row.start, state.width - 1)] for row in state.rows]  # one that leads is out
        at = torch.tensor(starts, device=state.ids.device)
        masks = (~state.decided.gather(1, at)).tolist()  # the host waits
        return {id(row) for row, (is_mask,) in zip(state.rows, masks, strict=True) if is_mask}

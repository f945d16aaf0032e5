"""SlowFast sampling: explore how far a block can be decided, then decide up to there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Annotated, Any

import torch
from torch import Tensor

from diffcache.dllm.rules import Rule, first
from diffcache.dllm.state import RowState
from diffcache.ranges import Count, Range, Share


@dataclass(eq=False)
class Cycle:
    """Cycle of a sequence's block; numbers are tokens from the start of the block."""

    start: int  # end of the cycle before it
    stop: int  # end of the cycle, as far as it is known
    explored: int = 0  # steps of exploration so far
    ends: list[int] = field(default_factory=list)  # estimates of the end
    is_known: bool = False  # whether the estimates agreed


@dataclass(frozen=True)
class SlowFast(Rule):
    """Commit carefully while the end of a cycle is looked for, then all that is sure up to there.

    A cycle begins with `explore` slow steps. Each estimates where the cycle ends, at the last mask
    of the block whose confidence is at least `low`, until `agree` estimates in turn have a standard
    deviation below `spread`; it may commit in the whole rest of the block. Then fast steps commit
    up to that end, until no mask is left there, and the next cycle begins. In either stage, where
    at least two masks are confident all of them are committed, else the best one.

    The published setting is one block: `Schedule(length, None)`.

    Departures: a block that is decided has no further slow steps. The published code leaves what
    comes after the end of a cycle out of its later forwards; rows are a policy's matter here, and
    policies that leave out masks make estimates shorter.

    Args:
        threshold: Confidence from which on masks are committed together, dimensionless, 0 to 1.
        low: Confidence that tells how far a cycle reaches, 0 to 1.
        explore: Slow steps of a cycle.
        agree: Estimates that have to agree.
        spread: Standard deviation below which they do, in tokens.

    Reference: SlowFast Sampling, arXiv 2506.10848, and its released code.
    """

    threshold: Share = 0.9
    low: Share = 0.3
    explore: Count = 6
    agree: Count = 2
    spread: Annotated[float, Range(0, endless=True)] = 1.0

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the confident candidates where there are two or more, else the best one."""
        sure = (scores >= self.threshold) & scores.isfinite()
        return sure.where(sure.sum(-1, keepdim=True) > 1, first(scores, 1))

    def commit(self, scores: Tensor, quota: int | Tensor, rows: Sequence[RowState], memory: dict[Any, Any]) -> Tensor:
        """Return the candidates of each sequence's stage that are committed; the host waits."""
        ends = []
        for number, (found, row) in enumerate(zip(scores.tolist(), rows, strict=True)):
            if number not in memory or row.step == 0:
                memory[number] = Cycle(0, len(found))
            ends.append([self._end(memory[number], found) if row.is_active else 0])
        at = torch.arange(scores.shape[1], device=scores.device)
        beyond = at >= torch.tensor(ends, device=scores.device)
        return self.choose(scores.masked_fill(beyond, float("-inf")), quota)

    def _end(self, cycle: Cycle, scores: list[float]) -> int:
        """Return where commits of a step end, and go on with the cycle."""
        size, is_open = len(scores), [score > float("-inf") for score in scores]
        if cycle.explored == self.explore and not any(is_open[: cycle.stop]):
            cycle.start, cycle.explored, cycle.ends, cycle.is_known = cycle.stop, 0, [], False
        if cycle.explored == self.explore:
            return cycle.stop
        cycle.explored += 1
        if not cycle.is_known:
            sure = [n for n in range(cycle.start, size) if scores[n] >= self.low]
            cycle.ends.append(min(max([*sure, cycle.start]) + 1, size))
            latest = cycle.ends[-self.agree :]
            cycle.is_known = len(latest) == self.agree and pstdev(latest) < self.spread
            cycle.stop = latest[-1] if cycle.is_known else int(fmean(latest))
        return size

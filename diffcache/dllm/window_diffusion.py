"""Window-Diffusion: leave out masks far from the decoded ones until the next refresh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from diffcache.dllm.decode import Schedule
from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.state import State
from diffcache.ranges import Count


@dataclass(frozen=True)
class WindowDiffusion(Policy):
    """Compute the masks that may be committed, and see the prompt, the words and the next masks.

    One step in `every` computes all rows: a phase begins. Its other steps compute the masks that
    may be committed (the active ones), what was committed last, and what was committed in this
    phase but for its first step. They see what is decided and the first `window` masks of the
    phase, as those were after its first step; masks beyond are seen by nobody until the next phase.

    The active masks are the window of the schedule: `Schedule(block=None, window=16)`, which is
    used where none is given.

    Departures from the code for LLaDA, which the steps are those of: the first step of a phase
    commits active masks, in the code any; a mask that is computed is always seen, in the code not
    where more are decided in a phase than `window` leaves room for; sequences of a batch have
    windows of their own, the code is for one. The paper, and the code for Dream, leave the masks
    beyond the window out of the first step of a phase as well, and compute all positions between
    active masks.

    Args:
        window: Masks that are seen in a phase.
        every: Steps of a phase; 1 for no cache.

    Reference: Window-Diffusion, arXiv 2601.20332, and its released code.
    """

    schedule: ClassVar[Schedule] = Schedule(block=None, window=16)

    window: Count = 64
    every: Count = 32

    def plan(self, state: State) -> RowPlan:
        """Return all rows at the first step of a phase, then active masks and recent words."""
        start = state.step - state.step % self.every
        if state.step == start:
            return ALL
        recent = state.since > start
        masks = ~state.decided | recent  # after the first step of the phase
        near = masks & (masks.cumsum(1) <= self.window)
        plan = state.plan(state.open | state.changed | recent)
        return replace(plan, seen=~masks | near | state.open)

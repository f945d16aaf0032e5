"""EntropyCache: compute every row after a commit that the model was unsure of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from diffcache.dllm.policy import FedRows, Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.rules import first
from diffcache.dllm.state import RowState, State
from diffcache.method import Ability
from diffcache.ranges import Range, Whole


@dataclass(frozen=True, eq=False)
class EntropyPlan(RowPlan):
    """A row plan that the entropy of what its rows predict is left on."""

    # after the forward one tensor, `[B, T]`, in nats; 0 at rows that it left out
    entropy: list[Tensor] = field(default_factory=list)

    def note(self, index: Tensor, width: int, logits: Tensor) -> None:
        """Note the entropy of the rows of a forward."""
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        found = -torch.nan_to_num(logs.exp() * logs).sum(-1)
        self.entropy.append(found.new_zeros(len(found), width).scatter(1, index, found))


@dataclass(frozen=True)
class UnsureRows(FedRows):
    """Compute the planned rows, and note on the plan how unsure the model is of each."""

    plans: ClassVar[type[RowPlan]] = EntropyPlan


@dataclass(frozen=True)
class EntropyCache(Policy):
    """Compute the open masks and the latest tokens, and all rows after an unsure commit.

    Where the distribution that one of the last commit's tokens was chosen from has an entropy of at
    least `threshold`, the step computes all rows of the sequence. Other steps compute the masks
    that may be committed and the `recent` tokens that were decided last, whose features go on
    changing for some steps.

    Departures: not compared with the authors' code, which is not released. The defaults are of this
    project. Entropy is that without noise and guidance. Tokens of one commit count as decided from
    left to right. Sequences of a batch refresh on their own.

    Args:
        threshold: Entropy in nats from which on all rows are computed; 0 for every step.
        recent: Tokens decided last that are computed again, besides those of the last commit.

    Reference: EntropyCache, arXiv 2603.18489, abstract.
    """

    threshold: Annotated[float, Range(0, endless=True)] = 0.5
    recent: Whole = 16

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute some rows, and to note how unsure they are."""
        return (UnsureRows(),)

    def plan(self, state: State) -> EntropyPlan:
        """Return all rows after an unsure commit, else open masks and the latest tokens."""
        if state.last is None:
            return EntropyPlan()
        assert isinstance(state.last, EntropyPlan)
        entropy = state.last.entropy[-1][: len(state.ids)]  # a second half is of guidance
        entropy = entropy.roll(state.shift, 1)  # of tokens, by the rows that predict them
        most = entropy.masked_fill(~state.changed, 0).amax(1)
        flags = (most >= self.threshold).tolist()  # the host waits
        unsure = {id(row) for row, flag in zip(state.rows, flags, strict=True) if flag}

        def is_whole(row: RowState) -> bool:
            return id(row) in unsure

        since = state.since.double().masked_fill(state.since < 0, float("-inf"))
        latest = first(since.flip(1), self.recent).flip(1)
        chosen = state.open | state.changed | latest
        return EntropyPlan(state.plan(chosen, is_whole).rows)

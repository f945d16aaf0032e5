"""View that a policy has of a decoding: tokens, what is decided since when, active blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.dllm.rows import ALL, RowPlan


@dataclass(frozen=True, slots=True)
class RowState:
    """Place of one sequence of the batch, in numbers of the host.

    Attributes:
        start: First position of its active block.
        stop: Position after the last of its active block.
        step: Step within the block, from 0.
        block: Number of the block, from 0.
        is_active: Whether it is still decoded.
        span: Positions of the block of attention that the active block lies in, where attention is
            causal over blocks. Empty elsewhere, as are the following ones.
        final: Position that all before are computed up to, as they stay.
        known: Position that all before have been computed up to, finished or not.
        leads: Whether the coming forward decides the first token of `span` alone, by the row before
            it, in a model whose rows predict the token after their own.
        edits: Forwards of the block since its last mask was decided.
        fill: Most tokens of its prompt that one forward computes, whole blocks of attention; 0 for
            all at once.
    """

    start: int
    stop: int
    step: int
    block: int
    is_active: bool = True
    span: range = range(0)
    final: int = 0
    known: int = 0
    leads: bool = False
    edits: int = 0
    fill: int = 0

    @property
    def is_filled(self) -> bool:
        """Return False if the coming forward computes rows of the prompt alone."""
        return not 0 < self.fill < self.span.start - self.final


@dataclass(frozen=True, eq=False)
class State:
    """A decoding before one of its forwards.

    In the papers' notation, at step t, `decided` is D(t-1) and `before` is D(t-2).

    Attributes:
        ids: Tokens, int64 `[B, T]`.
        decided: Positions that hold a token now, the prompt and padding among them, bool `[B, T]`.
        before: Positions that held one before the last commit, bool `[B, T]`.
        changed: Positions whose token the last commit changed, bool `[B, T]`.
        since: Step whose commit changed each position last, int64 `[B, T]`; -1 for none.
        prompt: Number of columns before the answer, padding among them.
        step: Forwards of the decoding so far.
        rows: Place of each sequence: its active block and step.
        valid: Positions that are no padding, bool `[B, T]`; None where there is no padding.
        upcoming: Positions that this step commits, bool `[B, T]`, where the order is drawn
            beforehand; None elsewhere.
        order: The order drawn of the answer's positions, the largest first, `[B, length]`; None
            where there is none.
        open: Positions that this step may commit, bool `[B, T]`.
        multiple: Number that rows are filled up to a multiple of.
        commits: Most masks of a sequence that a step commits by a fixed number; 1 where their
            confidence decides.
        last: The plan of the last forward, with what the model noted on it; None before the first.
        shift: Positions from a row to the token that it predicts, 0 or 1.
    """

    ids: Tensor
    decided: Tensor
    before: Tensor
    changed: Tensor
    since: Tensor
    prompt: int
    step: int
    rows: tuple[RowState, ...]
    open: Tensor
    valid: Tensor | None = None
    upcoming: Tensor | None = None
    order: Tensor | None = None
    multiple: int = 1
    commits: int = 1
    last: RowPlan | None = None
    shift: int = 0

    @property
    def width(self) -> int:
        """Positions of each sequence."""
        return self.ids.shape[1]

    @property
    def committed(self) -> Tensor:
        """Positions that the last commit decided, bool `[B, T]`."""
        return self.decided & ~self.before

    @property
    def answer(self) -> Tensor:
        """Positions of the answer, bool `[1, T]`."""
        return self.between([range(self.prompt, self.width)])

    @property
    def active(self) -> list[RowState]:
        """The sequences that are still decoded."""
        return [row for row in self.rows if row.is_active]

    def between(self, runs: Sequence[range]) -> Tensor:
        """Return a run of positions for every sequence, or one for all, bool `[B or 1, T]`."""
        ends = torch.tensor([[run.start, run.stop] for run in runs], device=self.ids.device)
        at = torch.arange(self.width, device=self.ids.device)
        return (at >= ends[:, :1]) & (at < ends[:, 1:])

    def each(self, run_of: Callable[[RowState], range]) -> Tensor:
        """Return a run of each sequence, from the row on that predicts its first token, bool `[B, T]`.

        In blocks of attention that row is computed where it is asked for alone.
        """
        runs = [(run_of(row), 0 if row.span else self.shift) for row in self.rows]
        return self.between([range(max(run.start - shift, 0), run.stop) for run, shift in runs])

    def runs(self, run_of: Callable[[RowState], range]) -> RowPlan:
        """Return the plan that computes one run of positions in each sequence."""
        wanted = {run_of(row) for row in self.active}
        if len(wanted) == 1:
            (run,) = wanted
            return ALL if run == range(self.width) else RowPlan(run)
        return self.plan(self.each(run_of))

    def plan(self, chosen: Tensor, whole: Callable[[RowState], bool] | None = None) -> RowPlan:
        """Return the plan that computes chosen positions, bool `[B or 1, T]`, or all where a sequence is `whole`.

        Padding and sequences that are done are left out.
        """
        if whole is not None:
            flags = [whole(row) for row in self.rows]
            if all(flag for flag, row in zip(flags, self.rows, strict=True) if row.is_active):
                return ALL
            if any(flags):
                chosen = chosen | torch.tensor(flags, device=chosen.device)[:, None]
        chosen = chosen.expand_as(self.ids)
        going = [row.is_active for row in self.rows]
        if not all(going):
            chosen = chosen & torch.tensor(going, device=chosen.device)[:, None]
        if self.valid is not None:
            chosen = chosen & self.valid
        return RowPlan.of(chosen, self.multiple)

    def with_predictors(self, plan: RowPlan) -> RowPlan:
        """Return a plan with the row before each token that may be committed, where that predicts it."""
        if plan.rows is None:
            return plan
        if isinstance(plan.rows, range):
            start = plan.rows.start
            is_within = all(row.span for row in self.rows)  # where a row more is another result
            if is_within and not bool(self.open[:, start : start + 1].any()):
                return plan
            return replace(plan, rows=range(max(plan.rows.start - 1, 0), plan.rows.stop))
        chosen = plan.mask(len(self.ids), self.width, self.ids.device)
        before = (chosen & self.open).roll(-1, dims=1)  # the first token is never open
        return replace(plan, rows=RowPlan.of(chosen | before, self.multiple).rows)


def check_coverage(state: State, plan: RowPlan) -> None:
    """Raise ValueError unless a plan computes all that may be committed, and all that was just changed.

    A changed token that is not computed is served with the keys and values of the token that it
    replaced. Plans that narrow down what may be committed need not compute all of it. The host
    waits for the device.
    """
    fed = plan.mask(len(state.ids), state.width, state.ids.device)
    going = torch.tensor([[row.is_active] for row in state.rows], device=fed.device)
    wanted = state.open if state.upcoming is None else state.upcoming
    if plan.narrows:
        wanted = torch.zeros_like(wanted)
    for what, needed in (("may be committed", wanted), ("was changed", state.changed)):
        missing = (needed & going & ~fed).nonzero()
        if len(missing):
            row, position = missing[0].tolist()
            raise ValueError(
                f"step {state.step}: the plan leaves out position {position} of sequence {row}, "
                f"which {what}{' by the last step' if what == 'was changed' else ''}; compute it, "
                "or decode without check=True"
            )

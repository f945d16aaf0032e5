"""Keep the keys and values of finished blocks, in text that grows block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from diffcache.dllm.policy import FedRows, Policy
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.state import RowState, State
from diffcache.method import Ability
from diffcache.ranges import Count


@dataclass(frozen=True)
class FinishedBlocks(FedRows):
    """Compute the last block of a text that grows, and serve the keys and values before it."""

    block: int | None = None  # tokens of a block; None for those that the pipeline's scheduler steps with


@dataclass(frozen=True)
class BlockCache(Policy):
    """Keep the keys and values of finished blocks.

    In `DiffusionLM`, for models whose attention is causal over blocks (LLaDA2, SDAR, Fast-dLLM v2):
    a step computes the active block, and its first one the block before it once more, as it stays.
    That is exact, up to rounding. Other policies do the same there, and choose rows of the active
    block besides.

    In pipelines that own the decoding loop: diffusers' `LLaDA2Pipeline` calls its model at every
    step with all tokens up to the end of the active block. Here the model computes the active
    block, and what stands from the first change since the last call on. A block that just ended is
    thus computed once more, together with the next one, and then no more. Changes are found by
    comparing tokens, so that token editing and callbacks that write tokens are served; the host
    waits for that once a call.

    This too is exact where a token sees its own block and those before it, and approximate where
    tokens attend both ways: finished blocks then keep what they were when the text was shorter. The
    report says which, and approximate runs warn. It is read off the masks of a call of the model
    itself, the first one with finished blocks and again when the text has doubled; the cache
    computes the same call beside it, and has to agree.

    There logits before the first position that is computed are NaN; the pipeline reads the last
    block alone. Other outputs of the model are left out.

    Args:
        block: Tokens of a block, for a bare model in a loop of yours inside `diffcache.run`; None
            for those of `DiffusionLM`, or that the pipeline's scheduler steps with.

    Reference: Block Diffusion, arXiv 2503.09573, section 3.
    """

    is_local: ClassVar[bool] = True
    block: Count | None = None

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute the last blocks only."""
        return (FinishedBlocks(self.block),)

    def plan(self, state: State) -> RowPlan:
        """Return all rows; those of finished blocks are left out of every plan."""
        return ALL


def whole_blocks(state: State) -> RowPlan | None:
    """Return the plan of a forward that leaves a policy no choice; None where it has one."""
    if state.last is None:
        return ALL
    if None in map(_whole, state.active):
        return None
    return state.runs(lambda row: _whole(row) or row.span)


def within_blocks(state: State, plan: RowPlan) -> RowPlan:
    """Restrict a policy's plan to active blocks, for attention that is causal over blocks.

    Rows of finished blocks are left out, and all after the active one, which nobody sees. The first
    forward of a block computes all of it, together with the block before it, whose last commit
    nothing has computed yet; it sees all. A row that leads needs that block alone.
    """
    whole = [_whole(row) for row in state.active]
    spans = {row.span for row in state.active}
    rows = range(state.width) if plan.rows is None else plan.rows
    if isinstance(rows, range) and len(spans) == 1 and not any(whole):
        (span,) = spans
        inner = range(max(rows.start, span.start), min(rows.stop, span.stop))
        return replace(plan, rows=inner or span)
    device = state.ids.device
    is_whole = torch.tensor([[_whole(row) is not None] for row in state.rows], device=device)
    chosen = plan.mask(len(state.ids), state.width, device) | is_whole
    chosen = chosen & state.between([_whole(row) or row.span for row in state.rows])
    seen = None if plan.seen is None else plan.seen | is_whole
    return replace(plan, rows=state.plan(chosen).rows, seen=seen)


def _whole(row: RowState) -> range | None:
    """Return the rows that a sequence has to compute, None where its policy chooses."""
    begin = row.span.start
    if not row.is_filled:
        return range(row.final, row.final + row.fill)
    if row.leads:
        return range(min(row.final, begin - 1), begin)
    if row.known < row.span.stop or row.final < begin:
        return range(min(row.final, begin), row.span.stop)
    return None

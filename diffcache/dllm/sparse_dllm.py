"""Sparse-dLLM: of what lies outside the block, each layer keeps what the block attends to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.dllm.policy import FedRows, Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.rules import first
from diffcache.dllm.state import State
from diffcache.method import Ability
from diffcache.ranges import Odd, Share


@dataclass(frozen=True, eq=False)
class SparsePlan(RowPlan):
    """A row plan of which every layer hides another part."""

    compiles: ClassVar[bool] = False

    inside: Tensor = field(kw_only=True)  # positions of each sequence's block, bool `[B, T]`
    # sequences of which layers choose, in this forward, what they keep, bool `[B, 1]`; None for none
    evicts: Tensor | None = field(kw_only=True)
    # sequences whose rows see what was kept and their block alone, bool `[B, 1]`; None for none
    hides: Tensor | None = field(kw_only=True)
    keep: float = field(kw_only=True)  # part of the positions outside the block that every layer keeps
    kernel: int = field(kw_only=True)  # positions that importance is pooled over

    def shown(self, kept: Tensor | None, mask: Tensor | None, count: int) -> Tensor | None:
        """Return what the rows of a layer see, bool `[B, 1, n, T]`; None for all.

        The layer keeps bool `[B, T]`, None where it evicted nothing yet; the mask, like the result, is of padding.
        """
        if kept is None or self.hides is None:
            return mask
        seen = (kept | ~self.hides)[:, None, None].expand(-1, -1, count, -1)
        return seen if mask is None else seen & mask

    def chosen(self, q: Tensor, k: Tensor, valid: Tensor | None, before: Tensor | None) -> Tensor | None:
        """Return what a layer keeps from now on, bool `[B, T]`: its choice, and the block.

        Queries of the rows are `[B, n, H, D]`, keys of all positions `[B, H or fewer, T, D]`, both
        rotated; what is no padding, and what it kept so far, bool `[B, T]`, None for all.
        """
        if self.evicts is None:
            return before
        index = self.index(len(q), k.shape[2], q.device)
        mine = self.inside.gather(1, index)
        mine[:, 1:] &= index[:, 1:] != index[:, :-1]  # others fill up
        mean = (q * mine[..., None, None]).sum(1) / mine.sum(1).clamp_min(1)[:, None, None]
        mean = mean.unflatten(1, (k.shape[1], -1)).mean(2)  # of the heads that share keys
        scores = (mean[:, :, None] @ k.mT)[:, :, 0].mean(1)
        others = ~self.inside if valid is None else ~self.inside & valid
        # neighbors are those that stand next to each other without the block
        order = (~others).long().argsort(dim=1, stable=True)
        scores = scores.masked_fill(~others, float("-inf")).gather(1, order)
        pooled = functional.max_pool1d(scores[:, None], self.kernel, 1, self.kernel // 2)[:, 0]
        pooled = pooled.where(scores.isfinite(), float("-inf"))
        number = (others.sum(1, keepdim=True).double() * self.keep).long()
        kept = torch.zeros_like(others).scatter(1, order, first(pooled, number)) | self.inside
        return kept.where(self.evicts, torch.ones_like(kept) if before is None else before)


@dataclass(frozen=True)
class SparseRows(FedRows):
    """Compute the planned rows, and hide from them what each layer has evicted."""

    plans: ClassVar[type[RowPlan]] = SparsePlan


@dataclass(frozen=True)
class SparseDLLM(Policy):
    """Compute the block beside the part of all else that each layer has kept for it.

    The first two steps of a block compute all rows. At the second, every layer keeps of the
    positions outside the block those most important to it, and later steps see no others: the mean
    query of the block times the key, its mean over heads, and the largest of that among `kernel`
    neighbors.

    Departures: what is evicted is out of sight, not out of memory, as the sequences of a batch
    evict at steps of their own; the published code is for one. Positions of padding are never kept,
    and counted out. Of equally important positions the first are kept, in the code any; else the
    choice was compared with the code's once, and is equal. Its decoding loop was not run.

    Args:
        keep: Part of the positions outside the block that is kept, 0 to 1, rounded down.
        kernel: Positions that importance is pooled over, an odd number; 1 for none.

    Reference: Sparse-dLLM, arXiv 2508.02558, and its released code for LLaDA.
    """

    keep: Share = 0.5
    kernel: Odd = 3

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute some rows, and to hide others from them."""
        return (SparseRows(),)

    def plan(self, state: State) -> SparsePlan:
        """Return all rows at the first two steps of a block, then the block."""
        # a row before predicts the first token where predictions are shifted
        blocks = [range(row.start - state.shift, row.stop) for row in state.rows]
        inside = state.between(blocks).expand_as(state.ids)
        flags = []
        for which in ([row.step == 1 for row in state.rows], [row.step > 1 for row in state.rows]):
            flags.append(torch.tensor(which, device=inside.device)[:, None] if any(which) else None)
        rows = state.plan(inside, lambda row: row.step < 2).rows
        return SparsePlan(rows, inside=inside, evicts=flags[0], hides=flags[1], keep=self.keep, kernel=self.kernel)

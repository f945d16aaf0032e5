"""Inputs of blocks that are held from call to call, and one call on its way through the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.extensions.row_inputs import Held
from diffcache.attach.extensions.rows import Turn
from diffcache.dllm.elastic_cache import WatchedPlan
from diffcache.kv.layer import KVLayer
from diffcache.kv.refresh import slots_of


@dataclass(eq=False)
class HeldInputs(Held[KVLayer]):
    """Keys, values and inputs of one run; every row is as it was when it was last computed.

    Attributes:
        inputs: Hidden states that each block was given, `[B, T, C]`.
        queries: Queries of each attention, `[B, T, H, D]`.
        arguments: Other arguments that the model gave each block at the last forward of all rows.
        tracked: Tokens whose attention is compared, bool `[B, T]`.
        starts: First block of each sequence that computed all rows at the last call; the number of
            blocks where none did.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)
    arguments: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    tracked: Tensor | None = None
    starts: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Spots:
    """Some positions of each sequence, filled up to one number.

    Attributes:
        places: Positions, int64 `[B, n]`.
        real: Mask of the positions that do not just fill up a sequence, bool `[B, n]`.
    """

    places: Tensor
    real: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> Spots:
        """Return the positions that a bool `[B, T]` names."""
        places = slots_of(chosen)
        number = torch.arange(places.shape[1], device=chosen.device)
        return cls(places, number < chosen.sum(1, keepdim=True))


@dataclass(eq=False)
class Way:
    """One call on its way through the blocks.

    Attributes:
        held: Keys, values and inputs of the run.
        turn: Plan of attention.
        plan: The plan that was asked for.
        planned: Its rows and the tracked tokens, bool `[B, T]`.
        tracked: Tokens to compare; None at a forward of all rows.
        window: Positions whose queries choose the tokens to track.
        starts: First block of each sequence that computes all rows; the number of blocks for none.
        fed: Positions that the current block computes, bool `[B, T]`.
        is_wide: Whether blocks run at full length.
        found: Tokens to track next, bool `[B, T]`.
        blocks: Blocks that ran so far.
    """

    held: HeldInputs
    turn: Turn
    plan: WatchedPlan
    planned: Tensor
    tracked: Spots | None
    window: Spots
    starts: list[int]
    fed: Tensor
    is_wide: bool
    found: Tensor
    blocks: set[int] = field(default_factory=set)

    def widen(self, block: int) -> bool:
        """Go on to a block; return whether it runs at full length."""
        if min(self.starts) > block:
            return False
        turn, width = self.turn, self.fed.shape[1]
        if not self.is_wide:
            mask = self.held.mask
            turn.index, turn.rows = range(width), width
            turn.mask = None if mask is None else mask.expand(-1, -1, width, -1)
            self.is_wide = True
        whole = torch.tensor([[start <= block] for start in self.starts], device=self.fed.device)
        self.fed = self.planned | whole
        return True

    def merged(self, held: Tensor | None, fresh: Tensor) -> Tensor:
        """Return what is held with the computed rows written over it.

        Args:
            held: `[B, T, ...]`, which may be written into; None where nothing is held.
            fresh: `[B, n, ...]`, n = T at full length.
        """
        if held is None:
            return fresh.clone()
        if self.is_wide:
            return fresh.where(self.fed.view(*self.fed.shape, *[1] * (fresh.dim() - 2)), held)
        index = self.turn.index
        assert isinstance(index, Tensor)
        held[batch_of(index), index] = fresh
        return held


def planned_rows(way: Way, out: Any) -> Any:
    """Return the output of the last block, of the planned rows alone."""
    if way.plan.rows is None:
        return out
    hidden = out if isinstance(out, Tensor) else out[0]
    batch, width = way.fed.shape
    places = way.plan.index(batch, width, hidden.device).contiguous()
    if not way.is_wide:
        assert isinstance(way.turn.index, Tensor)
        places = torch.searchsorted(way.turn.index.contiguous(), places)
    picked = hidden[batch_of(places), places]
    return picked if isinstance(out, Tensor) else (picked, *out[1:])


def batch_of(index: Tensor) -> Tensor:
    """Return the numbers of the sequences, int64 `[B, 1]`."""
    return torch.arange(len(index), device=index.device)[:, None]

"""MPCache's choice by query: large clusters first, small ones within, shared by two layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.blocks import Blocks, bounds, sizes, slots_of
from diffcache.kv.retrieval.gather import at_positions
from diffcache.kv.retrieval.select import Ask, Selecting, asked, fill
from diffcache.kv.retrieval.summary import Summary, known
from diffcache.kv.settings import Count, Factor, Share
from diffcache.kv.slots import Slots


@final
@dataclass(frozen=True)
class MinMaxTree(Selecting):
    """Choose large clusters by a mix of their bounds, small ones within, and share the choice.

    Reference: MPCache, arXiv 2501.06807, the part that looks at queries: clusters are
    of neighboring tokens, similarity is linear in the bounds, neighboring layers share indices.
    The number of slots that pass the first level is not given; here it is `widen` times those read.

    Args:
        large: Slots of a cluster of the first level, a multiple of `small`.
        small: Slots of a cluster of the second level.
        alpha: Weight of the upper bound, the lower has the rest; dimensionless, 0 to 1.
        widen: Slots that pass the first level, in those that are read.
        layers: Neighboring layers that read the same positions.
    """

    looks_across = True
    large: Count = 32
    small: Count = 16
    alpha: Share = 0.6
    widen: Factor = 2.0
    layers: Count = 2

    def check(self) -> None:
        """Raise ValueError unless clusters nest."""
        if self.large % self.small:
            raise ValueError(f"large={self.large}, small={self.small}: large must be a multiple of small")

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Widen the bounds of the last small cluster, and begin new ones."""
        return Blocks(self.small, "bounds").extend(old, fresh)

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the small clusters, or those of the layer before."""
        lead = known(ask.others[ask.layer.index - ask.layer.index % self.layers])
        if lead.at == ask.query.start and "chosen" in lead.state and ask.layer.index % self.layers:
            return at_positions(lead.state["chosen"], ask.summary.pos)
        lo, hi = bounds(ask.summary)
        free = sizes(ask)
        many = self.large // self.small
        missing = -lo.shape[2] % many
        lo, hi = (_paired(x, missing, many) for x in (lo, hi))
        wide = free.new_zeros(*free.shape[:2], free.shape[2] + missing)
        wide[..., : free.shape[2]] = free
        room = (ask.room * self.widen).long()
        first = over_groups(asked(ask.query, self._mix(lo.amin(3), hi.amax(3))), self.group)
        passed = fill(first, wide.unflatten(2, (-1, many)).sum(3), room)
        inside = passed.repeat_interleave(many, 2)[..., : free.shape[2]]
        fine = self._mix(lo.flatten(2, 3), hi.flatten(2, 3))[:, :, : free.shape[2]]
        second = over_groups(asked(ask.query, fine), self.group)
        left = free.expand_as(inside).where(inside, 0)
        return slots_of(fill(second, left, ask.room), ask.summary)

    def _mix(self, lo: Tensor, hi: Tensor) -> Tensor:
        """Return the vector that stands for a cluster."""
        return self.alpha * hi + (1 - self.alpha) * lo


def _paired(x: Tensor, missing: int, many: int) -> Tensor:
    """Return clusters [B, H, N, D] by the larger ones they are in; the last one filled up."""
    if missing:
        x = torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], 2)
    pairs: Tensor = x.unflatten(2, (-1, many))
    return pairs

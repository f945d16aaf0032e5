"""Quest: pages whose bounds say that a query may attend to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.blocks import Blocks, bounds, sizes, slots_of
from diffcache.kv.retrieval.gapless import Pick, Run, best_blocks
from diffcache.kv.retrieval.select import Ask, Selecting, fill
from diffcache.kv.retrieval.summary import Summary
from diffcache.kv.settings import Count
from diffcache.kv.slots import Slots


@final
@dataclass(frozen=True)
class Quest(Selecting):
    """Read the pages that could hold the highest logit.

    Reference: Quest, arXiv 2406.10774, section 3.4, algorithm 1. With grouped queries, which the
    paper does not treat, a page is worth what the query heads of a key-value head find it worth,
    brought together by `group`.

    Args:
        page: Slots of a page.
    """

    page: Count = 16

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Widen the bounds of the last page, and begin new ones."""
        return Blocks(self.page, "bounds").extend(old, fresh)

    @property
    def whole(self) -> int:
        """The page, where one that is not whole is read anyway."""
        return self.page if self.recent >= self.page - 1 else 0

    def extend_whole(self, old: Summary, fresh: Slots) -> Summary:
        """Add the bounds of whole pages."""
        return Blocks(self.page, "bounds").extend_whole(old, fresh)

    def pick(self, run: Run) -> Pick:
        """Return the slots of the pages of the highest bounds."""
        return best_blocks(over_groups(upper(run.query, run.summary), self.group), self.page, run)

    def choose(self, ask: Ask) -> Tensor:
        """Return the slots of the pages of the highest bounds."""
        score = over_groups(upper(ask.query, ask.summary), self.group)
        return slots_of(fill(score, sizes(ask), ask.room), ask.summary)


def upper(query: Query, summary: Summary) -> Tensor:
    """Return what no logit within a block is above, float32 [B, H, G, n, N]."""
    lo, hi = bounds(summary)
    q = query.grouped(lo.shape[1]).float() * query.scale
    rows, up = q.flatten(2, 3), q.clamp_min(0).flatten(2, 3)
    most: Tensor = up @ hi.mT + (rows - up) @ lo.mT
    return most.view(*q.shape[:4], -1)

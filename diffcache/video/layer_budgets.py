"""Layer budgets: layers that look far back hold more than those that look at the newest frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from diffcache.kv.attend import logits, over_groups
from diffcache.kv.budget import Budget
from diffcache.kv.learn.scalekv import capacities, selectivity
from diffcache.kv.observe import Observation
from diffcache.kv.positions import Absolute
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.attention import pooled, with_window
from diffcache.kv.score.base import Score
from diffcache.ranges import Count, Range, Share, Whole
from diffcache.video.policy import VideoPolicy
from diffcache.video.window import rolling

_ASKS = 16  # queries, spread over the latest frames


@dataclass(frozen=True)
class LayerBudgets(VideoPolicy):
    """Hold more in layers that attend widely, and in all of them what is attended to.

    The least selective layers draft and the others refine. Refiners hold `reduction` less than
    `window`, and drafters share what that saves. Every layer holds the latest frames, and of those
    before them the tokens that 16 queries of the latest frames attend to most. Layers take their
    parts once, when refiners first have to drop something, and keep them until a switch throws
    frames away.

    Departures: ScaleKV is for images that are made scale by scale; here chunks are in the place of
    scales, and budgets are the same for all, as none is the last. It finds drafters on ten prompts
    beforehand; here each stream finds its own. Compared with no released code.

    Args:
        window: Frames that the average layer holds beside the chunk.
        recent: Latest of them that every layer holds, which ask; best the frames of a chunk.
        drafters: Share of the layers that draft, from 0 to 1, at least one layer unless it is 0.
        reduction: Share of `window` that a refiner goes without, from 0 to below 1.
        sinks: First frames, held for ever.

    Raises:
        ValueError: If a refiner cannot hold what always stays.

    Reference: after ScaleKV, arXiv 2505.19602, section 3.3.
    """

    window: Count = 12
    recent: Count = 3
    drafters: Share = 0.25
    reduction: Annotated[float, Range(0, 1, below=True)] = 0.5
    sinks: Whole = 1

    def check(self) -> None:
        """Raise ValueError unless a refiner can hold what always stays."""
        least = self.window * (1 - self.reduction)
        if least + 1e-9 < self.recent + self.sinks:
            raise ValueError(
                f"window={self.window}, reduction={self.reduction}: a refiner holds {least:g} "
                f"frames, and recent={self.recent} and sinks={self.sinks} always stay; set "
                f"window={self.window + self.recent + self.sinks} or reduction=0"
            )

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops tokens, of some layers more than of others."""
        recent = self.recent * unit
        parts = Parts(self.window * unit, recent, self.drafters, self.reduction)
        held = rolling(self.name, self.sinks * unit, recent, Absolute())
        return replace(held, score=Spread(recent), budget=parts)


@dataclass(frozen=True)
class Spread(Score):
    """Score by the attention of few queries, spread over the latest tokens, which stay.

    Args:
        size: Latest tokens.

    Reference: after ScaleKV, arXiv 2505.19602, section 3.3. Departure: queries are spread evenly,
    where those of the paper are the middles of patches of a map.
    """

    size: int

    @property
    def window(self) -> int:
        """Return the number of latest tokens."""
        return self.size

    def __call__(self, seen: Observation) -> Tensor:
        """Return the mean attention of every slot, the mean of 5 neighbors, [B, H, S]."""
        width = seen.slots.width
        earlier = _probs(seen, self.size).mean(3)[..., : max(width - self.size, 0)]
        return with_window(pooled(over_groups(earlier, "mean"), 5, "avg"), width)


@dataclass(frozen=True)
class Parts(Budget):
    """Give drafting layers more slots than refining ones.

    Args:
        size: Slots of the average layer.
        recent: Latest slots, by whose queries layers are told apart.
        drafters: Share of the layers that draft.
        reduction: Share of `size` that refiners go without.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3.
    """

    size: int
    recent: int
    drafters: float
    reduction: float

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the slots of every layer, the same for its heads."""
        held = torch.stack([each.lengths[:, 0] for each in seen])  # [L, B]
        count = len(seen)
        drafters = 0 if self.drafters == 0 else max(round(self.drafters * count), 1)
        drafters = 0 if drafters == count else drafters  # then all hold the same
        least = round(self.size * (1 - self.reduction)) if drafters else self.size
        if not bool((held > least).any()):
            return [each.lengths for each in seen]
        table = []
        for row, lengths in enumerate(held.T):
            # Layers that hold more than others are those that were found to draft.
            index = -lengths.double()
            if drafters and bool((lengths == lengths[0]).all()):
                index = torch.stack([self._selectivity(each, row) for each in seen])
            found = capacities(index[:, None], self.size, drafters=drafters, reduction=self.reduction)
            table.append([slots for (slots,) in found])
        wanted = torch.tensor(table, device=held.device).T
        return [slots[:, None].minimum(each.lengths) for slots, each in zip(wanted, seen, strict=True)]

    def _selectivity(self, seen: Observation, row: int) -> Tensor:
        return selectivity(_probs(seen, self.recent)[row], min(self.recent, seen.slots.width))


def _probs(seen: Observation, size: int) -> Tensor:
    """Return how some of the last queries attend, [B, H, G, n, S]."""
    last = seen.last(size)
    index = torch.linspace(0, last.count - 1, min(_ASKS, last.count)).round().long()
    index = index.to(last.q.device)
    asked = replace(last, q=last.q[:, :, index], pos=last.positions()[:, index], causal=False)
    return logits(asked, seen.slots).float().softmax(-1)

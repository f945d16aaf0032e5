"""Attention of a few queries spread evenly over an image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.attend import logits, over_groups
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import ALWAYS, pooled
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Count, Mode, Odd, Whole


@dataclass(frozen=True)
class PatchCenters(Score):
    """Score by a few queries of the token map that came last; their own slots stay.

    The map is cut into a grid of patches, as many whatever its size, and the token in the middle of
    each asks. All tokens of a map see one another.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3. A middle is that of the official code, the
    token before it where a patch has an even side; rows and columns beyond the last whole patch are
    in none. Departures: maps that are not square are cut alike, and those smaller than the grid
    into single rows or columns, where the official code then asks the last tokens; queries are
    those that attention used, where the official code projects its own, unrotated ones.

    Args:
        scales: Height and width of each token map, first to last.
        prompt: Tokens that come before the first map.
        grid: Patches along each side.
        kernel: Slots that are pooled, around each, odd.
        mode: `"paper"` takes the mean of the attention, pooled by the average; `"official"` the sum
            of the logits, pooled by the largest, the slots of the queries left out.
    """

    scales: tuple[tuple[int, int], ...]
    prompt: Whole = 0
    grid: Count = 4
    kernel: Odd = 5
    mode: Mode = "paper"

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if not self.scales or min(min(scale) for scale in self.scales) < 1:
            raise ValueError(f"scales={self.scales}: must be (height, width) of at least one token map")

    @property
    def window(self) -> int:
        """Tokens of the largest map."""
        return max(height * width for height, width in self.scales)

    def __call__(self, seen: Observation) -> Tensor:
        """Return the scores, infinite where a query stands; ValueError if rows are not at the end of a map."""
        height, width = self.last(seen)
        rows, columns = (middles(length, self.grid) for length in (height, width))
        index = torch.tensor(rows)[:, None] * width + torch.tensor(columns)
        index = index.flatten().to(seen.slots.k.device)
        last = seen.last(height * width)
        asked = replace(last, q=last.q[:, :, index], pos=last.positions()[:, index], causal=False)
        found = logits(asked, seen.slots)
        own = torch.zeros(seen.slots.width, dtype=torch.bool, device=index.device)
        own[seen.slots.width - height * width + index] = True
        if self.mode == "official":
            found = pooled(found.masked_fill(own, float("-inf")).sum(3), self.kernel, "max")
        else:
            found = pooled(found.softmax(-1).mean(3), self.kernel, "avg")
        return over_groups(found, "mean").masked_fill(own, ALWAYS)

    def last(self, seen: Observation) -> tuple[int, int]:
        """Return height and width of the map that was written last."""
        tokens = seen.tokens.unique().tolist()
        end = self.prompt
        for height, width in self.scales:
            end += height * width
            if tokens == [end]:
                return height, width
        raise ValueError(
            f"tokens={tokens}: after each of the maps {self.scales} and a prompt of {self.prompt} "
            "tokens all rows must have seen as many as these have together"
        )


def middles(length: int, grid: int) -> list[int]:
    """Return the middle of each of the patches along one side, as many as fit of `grid`."""
    count = min(grid, length)
    size = length // count
    return [number * size + (size - 1) // 2 for number in range(count)]

"""Scores by attention: of the last queries, chosen heads or places among them, of the last one, and of all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Groups, Query, logits, over_groups
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import LastQueries, Score
from diffcache.kv.settings import Count, Mode, NotNegative, Odd, Whole

Pooling = Literal["avg", "max"]
ALWAYS = float("inf")


def pooled(x: Tensor, kernel: int, pooling: str) -> Tensor:
    """Pool over neighboring slots; what is beyond the ends counts as zero.

    Args:
        x: [..., S], not negative.
        kernel: Slots, odd.
        pooling: `"avg"` or `"max"`.
    """
    if kernel == 1 or not x.shape[-1]:
        return x
    pool = functional.avg_pool1d if pooling == "avg" else functional.max_pool1d
    return pool(x.flatten(0, -2), kernel, 1, kernel // 2).view_as(x)


def with_window(earlier: Tensor, width: int) -> Tensor:
    """Return scores of the earlier slots [B, H, S - w] and, for the last w, that they stay."""
    return functional.pad(earlier, (0, width - earlier.shape[-1]), value=ALWAYS)


@dataclass(frozen=True)
class Window(LastQueries):
    """Score by the attention of the last queries, pooled over neighbors; their slots stay.

    Query heads are reduced first and slots pooled then, which matters where either takes the
    largest. Queries of padding count for nothing. An infinite score keeps the window.

    Args:
        size: Queries, whose own slots always stay.
        kernel: Neighboring slots that are pooled, odd; 1 pools nothing.
        pooling: `"avg"` or `"max"`.
        groups: Reduction over the query heads of a key-value head: `"mean"`, `"max"` or `"sum"`.

    Reference: SnapKV, arXiv 2404.14469, section 4.1 and listing 1.
    """

    size: Count = 32
    kernel: Odd = 5
    pooling: Pooling = "avg"
    groups: Groups = "mean"

    def __call__(self, seen: Observation) -> Tensor:
        """Return the pooled mean attention, infinite for the slots of the window."""
        width = seen.slots.width
        before = max(width - self.size, 0)
        mean = seen.window_mean(seen.probs(self.size)[..., :before])
        return with_window(pooled(over_groups(mean, self.groups), self.kernel, self.pooling), width)


@dataclass(frozen=True)
class WindowVariance(LastQueries):
    """Score by mean and variance of the attention of the last queries; their slots stay.

    A slot whose attention shifts over the window is kept even if it is low on average.

    Args:
        size: Queries, whose own slots always stay.
        gamma: Weight of the variance; dimensionless.
        kernel: Neighboring slots whose average is taken, odd; 1 takes none.

    Reference: CAKE, arXiv 2503.12491.
    """

    size: Count = 32
    gamma: NotNegative = 200.0
    kernel: Odd = 5

    def __call__(self, seen: Observation) -> Tensor:
        """Return the pooled mean and variance, infinite for the slots of the window."""
        width = seen.slots.width
        probs = seen.probs(self.size)[..., : max(width - self.size, 0)]
        found = seen.window_mean(probs) + self.gamma * window_variance(seen, probs)
        return with_window(over_groups(pooled(found, self.kernel, "avg"), "mean"), width)


def window_variance(seen: Observation, probs: Tensor) -> Tensor:
    """Return the variance over the last queries, those of padding left out.

    It is the estimate with one degree of freedom less than queries, and zero for one query.

    Args:
        seen: The layer.
        probs: [B, H, G, w, S].

    Returns:
        [B, H, G, S].
    """
    valid = seen.query_valid[:, -probs.shape[3] :]
    count = valid.sum(-1).view(-1, 1, 1, 1)
    mean = seen.window_mean(probs)[:, :, :, None]
    return seen.window_mean((probs - mean).square()) * (count / (count - 1).clamp_min(1))


@dataclass(frozen=True)
class LastQuery(Score):
    """Score by the attention of the last query, averaged over all heads of a layer.

    All heads of a layer so keep the same slots; the newest slot always stays.

    Reference: TOVA, Transformers are Multi-State RNNs, arXiv 2401.06104.
    """

    window = 1
    in_place: ClassVar[bool] = True
    alike: ClassVar[bool] = True

    def __call__(self, seen: Observation) -> Tensor:
        """Return the mean attention, infinite for the newest slot."""
        mean = seen.mass(1)[..., :-1].mean(1)
        return with_window(mean[:, None], seen.slots.width).expand(seen.slots.k.shape[:3])


@dataclass(frozen=True)
class Mass(Score):
    """Score by the attention that a slot got from all queries, the mean over query heads.

    Args:
        mean: Divide by the number of queries that could see the slot, rather than take the sum.

    Reference: H2O, arXiv 2306.14048, section 4.1, algorithm 1.
    """

    in_place: ClassVar[bool] = True
    mean: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics it keeps of every slot."""
        return ("mass", "asked") if self.mean else ("mass",)

    def __call__(self, seen: Observation) -> Tensor:
        """Return the sum, or the mean."""
        mass = seen.stats.get("mass")
        if mass is None:
            raise ValueError("no attention was observed: the cache must be used through attention, in mode='native'")
        return mass / seen.stats["asked"].clamp_min(1) if self.mean else mass

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Add what the queries of a forward attended to."""
        stats["mass"] += attended.sums()
        if self.mean:
            stats["asked"] += attended.counts()

    def track(self, stats: dict[str, Tensor], asked: Query, found: Tensor, probs: Tensor) -> None:
        """Add what a block of queries attended to."""
        stats["mass"] += probs.sum(3).mean(2)
        if self.mean:
            there = (probs > 0).any(-1).any(2)[..., None]  # queries that are of tokens
            saw = (found > float("-inf")).any(2) & there
            stats["asked"] += saw.sum(2).to(torch.float32)


@dataclass(frozen=True)
class HeadVote(LastQueries):
    """Average the attention of the last queries over a few query heads of the layer.

    All key-value heads get the same scores, and so keep the same tokens.

    Reference: CompressKV, arXiv 2508.02401 (window 8, pooling 5, four heads a layer).

    Args:
        heads: Numbers of the query heads of each layer that vote
            (`diffcache.kv.learn.compresskv.top_heads`); empty has all heads vote.
        size: Queries, whose own slots always stay.
        kernel: Neighboring slots whose average is taken, odd.
    """

    heads: tuple[tuple[int, ...], ...] = ()
    size: Count = 8
    kernel: Odd = 5

    def check(self) -> None:
        """Raise ValueError if a layer has no heads."""
        for layer, heads in enumerate(self.heads):
            if not heads or min(heads) < 0 or len(set(heads)) < len(heads):
                raise ValueError(f"heads[{layer}]={heads}: name at least one query head, each once, from 0")

    def __call__(self, seen: Observation) -> Tensor:
        """Return the vote, [B, H, S], infinite in the window; raise ValueError if the table is of another model."""
        width = seen.slots.width
        probs = seen.probs(self.size)[..., : max(width - self.size, 0)]
        mean = seen.window_mean(probs).flatten(1, 2)  # [B, Hq, S - w]
        if self.heads:
            if seen.layer >= len(self.heads) or max(self.heads[seen.layer]) >= mean.shape[1]:
                raise ValueError(
                    f"heads={self.heads}: layer {seen.layer} has {mean.shape[1]} query heads; find the heads of "
                    "this model with diffcache.kv.learn.compresskv.top_heads"
                )
            mean = mean[:, torch.tensor(self.heads[seen.layer], device=mean.device)]
        vote = pooled(mean.mean(1, keepdim=True), self.kernel, "avg")
        return with_window(vote, width).expand(seen.slots.k.shape[:3])


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

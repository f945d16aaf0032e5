"""Scores by attention: of the last queries, of the last one, and of all there were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Groups, Query, over_groups
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import LastQueries, Score
from diffcache.kv.settings import Count, NotNegative, Odd

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

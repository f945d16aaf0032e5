"""Number of masks that a step decides: a fixed quota, or all that are confident enough."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.dllm.state import RowState
from diffcache.ranges import Range, Settings, Share, Whole


class Rule(Settings, ABC):
    """Choice of the block's candidates that are committed; a frozen dataclass of settings.

    Attributes:
        editing: Probability above which another token takes the place of a decided one; None where
            decided tokens stay.
        post_steps: Most forwards of a block for edits alone.
    """

    editing: float | None = None
    post_steps: int = 0

    @property
    def is_fixed(self) -> bool:
        """Return True if the number of commits is known, whatever the model says."""
        return False

    def quotas(self, size: int, steps: int) -> list[int]:
        """Return how many positions each step of a block commits, at least where none is confident.

        Args:
            size: Masks of the block.
            steps: Steps of the block.
        """
        return [size // steps + (i < size % steps) for i in range(steps)]

    @abstractmethod
    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return which candidates are committed, bool `[B, n]`.

        Args:
            scores: Confidence of each candidate, `[B, n]`, -inf where it cannot be committed.
            quota: Commits of this step by `quotas`, of each sequence where it is int64 `[B, 1]`.
        """

    def commit(self, scores: Tensor, quota: int | Tensor, rows: Sequence[RowState], memory: dict[Any, Any]) -> Tensor:
        """Return which candidates are committed, bool `[B, n]`, by steps before as well.

        Args:
            scores: Confidence, as for `choose`.
            quota: Commits of this step, as for `choose`.
            rows: Place of each sequence; one at the first step of a block begins anew.
            memory: What the rule keeps of the decoding.
        """
        return self.choose(scores, quota)

    def weighed(self, logits: Tensor, masks: Tensor, rows: Sequence[RowState], memory: dict[Any, Any]) -> Tensor:
        """Return the logits that tokens and confidence are taken from, `[B, n, V]`.

        Args:
            logits: Logits of the blocks' tokens, `[B, n, V]`.
            masks: Masks that may be committed, bool `[B, n]`.
            rows: Place of each sequence.
            memory: What the rule keeps of the decoding.
        """
        return logits


@dataclass(frozen=True)
class Quota(Rule):
    """Commit a fixed number of masks a step, the most confident first.

    Args:
        schedule: `even` spreads a block's masks evenly over its steps (LLaDA); `time` follows the
            noise level, `1 - t[i+1] / t[i]` of the remaining ones at times evenly spaced from 1 to
            0.001, and leaves the rest to the last step (Dream).

    Reference: LLaDA, arXiv 2502.09992, appendix B; Dream, arXiv 2508.15487.
    """

    schedule: Literal["even", "time"] = "even"

    @property
    def is_fixed(self) -> bool:
        """Return True if the number of commits is known beforehand."""
        return True

    def quotas(self, size: int, steps: int) -> list[int]:
        """Return how many positions each step of a block commits."""
        if self.schedule == "even":
            return super().quotas(size, steps)
        times = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64).tolist()
        quotas, left = [], size
        for i in range(steps - 1):
            quotas.append(int(left * (1 - times[i + 1] / times[i])))
            left -= quotas[-1]
        return [*quotas, left]

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the best candidates; of equal ones the first."""
        return first(scores, quota)


@dataclass(frozen=True)
class Threshold(Rule):
    """Commit every mask that is confident enough, and always the most confident one.

    Args:
        threshold: Least confidence, dimensionless, 0 to 1; 0 commits all masks at once.

    Reference: Fast-dLLM, arXiv 2505.22618, section 3.3.
    """

    threshold: Annotated[float, Range(0, 1), "; for one token a step, use Quota()"] = 0.9

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the confident candidates and the best one."""
        return ((scores >= self.threshold) & scores.isfinite()) | first(scores, 1)


@dataclass(frozen=True)
class Hierarchical(Rule):
    """Commit every mask that is confident enough, and the best one of every run of masks.

    A run of adjacent masks is cut in two by a commit in its midst, so that later commits lie apart
    and disturb each other less. The best mask of all is always committed.

    Args:
        threshold: Confidence above which masks are committed, dimensionless, 0 to 1.
        low: Confidence above which the best mask of a run is committed, 0 to 1.

    Departure: of equally confident masks of a run all are committed, as in one of the two published
    versions; the other commits the first.

    Reference: dInfer, arXiv 2510.08666, and its released code (`HierarchyDecoder`).
    """

    threshold: Share = 0.9
    low: Share = 0.4

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the confident candidates, the best of every run, and the best of all."""
        masks = scores.isfinite()
        begins = masks & ~functional.pad(masks, (1, 0))[:, :-1]
        run = (begins.long().cumsum(-1) - 1).clamp_min(0)
        tops = torch.full_like(scores, float("-inf")).scatter_reduce(1, run, scores, "amax")
        best = masks & (scores == tops.gather(1, run)) & (scores > self.low)
        return best | (scores > self.threshold) | first(scores, 1)


@dataclass(frozen=True)
class Factor(Rule):
    """Commit as many masks as their confidence allows to be decided at once.

    The n most confident ones are committed, with n the largest number for which
    `(n + 1) * (1 - c[n]) < factor`, c[n] the confidence of the n-th; at least one.

    Args:
        factor: Bound, dimensionless; 0 commits one mask a step.

    Reference: Fast-dLLM, arXiv 2505.22618, section 3.3 and its released code.
    """

    factor: Annotated[float, Range(0, endless=True)] = 1.0

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the best candidates, as many as their confidence allows."""
        ordered = scores.sort(dim=-1, descending=True).values
        number = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        fits = (number + 1) * (1 - ordered) < self.factor  # False at -inf
        most = number.where(fits, 1).amax(-1, keepdim=True)
        return (ranks(scores) < most) & scores.isfinite()


@dataclass(frozen=True)
class Dynamic(Rule):
    """Commit every mask that is confident enough, or the step's share where these are fewer.

    What LLaDA2 and SDAR decode with (`low_confidence_dynamic`). With `editing`, tokens of the block
    are replaced where another one becomes probable (LLaDA2.1), and its forwards go on after its
    last mask for as long as they edit, unless its steps are used up.

    Their code takes confidence in float32: `Sampler(softmax="float32")` to the bit.

    Args:
        threshold: Confidence above which masks are committed, dimensionless; 1 for none.
        editing: Probability above which another token takes the place of a decided one; None
            for no edits.
        post_steps: Most forwards of a block for edits alone.

    Departure: SDAR's code fills the share up with tokens that are decided where there are fewer
    masks, and overwrites them; here these stay.

    Reference: LLaDA2.0, arXiv 2512.15745; LLaDA2.1, arXiv 2602.08676; SDAR, arXiv 2510.06303; and
    their released code.
    """

    threshold: Share = 0.9
    editing: Share | None = None
    post_steps: Whole = 16

    def choose(self, scores: Tensor, quota: int | Tensor) -> Tensor:
        """Return the confident candidates, or the best ones where these are fewer."""
        sure = scores > self.threshold
        return sure.where(sure.sum(-1, keepdim=True) >= quota, first(scores, quota))


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of each score in its row, 0 for the largest; of equal ones the first."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def first(scores: Tensor, count: int | Tensor) -> Tensor:
    """Return which of the scores are the `count` largest of their row, those of -inf left out."""
    if isinstance(count, int) and count == 1:  # by far the most, and sorting costs more
        best = torch.zeros_like(scores, dtype=torch.bool)
        return best.scatter_(-1, scores.argmax(-1, keepdim=True), True) & scores.isfinite()
    return (ranks(scores) < count) & scores.isfinite()

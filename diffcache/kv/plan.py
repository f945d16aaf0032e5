"""Plans: keep, drop or demote every slot, given scores and a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.score.vectors import projected_norm
from diffcache.kv.settings import Count, NotNegative, Settings, Share, Whole

KEEP, DROP = 0, -1


class Planner(Settings, ABC):
    """Plan for every slot; a frozen dataclass of settings."""

    @property
    def wants_out(self) -> bool:
        """Return whether it reads the weight of the output projection."""
        return False

    def ends(self, budget: int) -> tuple[int, int] | None:
        """Return how many first and last tokens of a row of `budget` stay, where scores alone decide on all others.

        None stands for any other plan.
        """
        return None

    @abstractmethod
    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what becomes of every slot.

        Args:
            score: [B, H, S], -inf in empty slots.
            budget: Slots a row may hold, int64 [B, H].
            seen: The layer.

        Returns:
            int8 [B, H, S]: -1 it is dropped, 0 it is kept as it is, n > 0 it goes to the n-th
            codec of the recipe's ladder.
        """


def ranks(score: Tensor) -> Tensor:
    """Return the rank of every slot, 0 for the highest score; of equals the later slot first.

    Args:
        score: [B, H, S].

    Returns:
        int64 [B, H, S].
    """
    order = torch.argsort(score.flip(-1), dim=-1, descending=True, stable=True)
    places = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places).flip(-1)


def protected(score: Tensor, seen: Observation, sinks: int, recent: int | Tensor) -> Tensor:
    """Return scores in which the first and the last tokens come before all others.

    Where the budget holds less than all of them, the latest are kept first.

    Args:
        score: [B, H, S].
        seen: The layer.
        sinks: First tokens of a row.
        recent: Last tokens of a row, the same of all, or int64 [B, H, 1].
    """
    width = score.shape[-1]
    place = torch.arange(width, device=score.device)
    first = place - seen.pad[..., None]
    is_first = (first >= 0) & (seen.slots.pos >= 0) & (first < sinks)
    is_last = place >= width - recent
    score = score.masked_fill(is_first, float("inf"))
    return score.masked_fill(is_last & seen.valid, float("inf"))


@dataclass(frozen=True)
class TopK(Planner):
    """Keep the slots of the highest scores, and always the first and last tokens.

    Args:
        sinks: First tokens that are always kept.
        recent: Last tokens that are always kept.
    """

    sinks: Whole = 0
    recent: Whole = 0

    def ends(self, budget: int) -> tuple[int, int]:
        """Return the numbers it was made with."""
        return self.sinks, self.recent

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        rank = ranks(protected(score, seen, self.sinks, self.recent))
        keep = (rank < budget[..., None]) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)


@dataclass(frozen=True)
class ByAge(Planner):
    """Hold blocks of tokens at the level that the age of their youngest says.

    Reference: none; how it goes with the shift of PM-KVQ is ours.

    Args:
        steps: Ages in tokens, rising: a block that is `steps[i]` old comes to level `i + 1`.
        block: Tokens that move together.
    """

    steps: tuple[int, ...] = (32, 128, 512)
    block: Count = 32

    def check(self) -> None:
        """Raise ValueError if the ages do not rise, or a number is less than 1."""
        rising = all(a < b for a, b in zip((0, *self.steps), self.steps, strict=False))
        if not self.steps or not rising:
            raise ValueError(f"steps={self.steps}: must be ages that rise, at least 1 token")

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return the levels; scores and budget count for nothing."""
        place = torch.arange(score.shape[-1], device=score.device) - seen.pad[..., None]
        end = (place // self.block + 1) * self.block
        age = seen.lengths[..., None] - end
        level = sum((age >= step).to(torch.int8) for step in self.steps)
        if seen.levels is not None:
            level = torch.where(level > seen.levels, level, KEEP)
        return torch.where(seen.valid, level, KEEP).to(torch.int8)


@dataclass(frozen=True)
class TwoStage(Planner):
    """Keep a share of the budget by score, and the rest by score times what a value contributes.

    The contribution is the 1-norm of the value behind the output projection, the mean over the
    query heads of a key-value head.

    Args:
        first: Share of the budget that goes by the score alone, from 0 to 1.
        epsilon: Number added to the score before it is multiplied; dimensionless.

    Reference: CriticalKV, Identify Critical KV Cache in LLM Inference from an Output Perturbation
    Perspective, arXiv 2502.03805, algorithm 1.
    """

    wants_out = True
    first: Share = 0.5
    epsilon: NotNegative = 1e-4

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        first = (budget * self.first + 1e-9).floor().long()
        if self.first > 0:
            first = first.clamp_min(1)
        chosen = ranks(score) < first[..., None]
        product = (score + self.epsilon) * projected_norm(seen)
        # Infinite scores stay what they are: slots that must be kept, and empty ones.
        product = product.where(score.isfinite(), score).masked_fill(chosen, float("inf"))
        keep = (ranks(product) < budget[..., None]) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)


@dataclass(frozen=True)
class Demote(Planner):
    """Hold the best slots at one level of the ladder and the others at another.

    Slots that a codec of the ladder holds already stay there: coded again they would only lose.

    Args:
        top: Level of the best slots; 0 leaves them exact.
        rest: Level of the others.
        recent: Share of the budget that the latest tokens take, whatever their score.
        fresh: The budget is meant as the share of those slots that no codec holds yet, rather than
            as the number of slots that may stay at the level `top`.

    References: MiKV, arXiv 2402.18096 (`top=0`, half the budget recent, as in H2O);
    ZipCache, arXiv 2405.14256 (`top=1, rest=2, fresh=True`).
    """

    top: Whole = 0
    rest: Count = 1
    recent: Share = 0.0
    fresh: bool = False

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if self.top == self.rest:
            raise ValueError(f"top={self.top}, rest={self.rest}: must be two levels")

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return the levels."""
        free = seen.valid.expand(score.shape)
        if seen.levels is not None:
            free = free & (seen.levels == 0)
        if self.fresh:
            share = budget / seen.lengths.clamp_min(1)
            budget = (free.sum(-1) * share + 1e-4).floor().long()
        recent = (budget * self.recent + 1e-9).floor().long()[..., None]
        is_last = torch.arange(score.shape[-1], device=score.device) >= score.shape[-1] - recent
        # Slots without any attention may have -inf like those that are no longer free: these last.
        score = score.clamp_min(torch.finfo(score.dtype).min).masked_fill(is_last, float("inf"))
        rank = ranks(score.masked_fill(~free, float("-inf")))
        plan = torch.where(rank < budget[..., None], self.top, self.rest)
        return torch.where(free, plan, KEEP).to(torch.int8)


@dataclass(frozen=True)
class FixedSlot(Planner):
    """Keep the best slots of a prompt; from then on drop those at a fixed distance from the end.

    Reference: PrefixKV, arXiv 2412.03409, official code: once slots were dropped, a new token
    pushes out the slot that is `distance` slots before the end, whatever it is worth.

    Args:
        distance: Distance of the slot that goes from the end, in slots: 1 is the newest.
        sinks: First tokens of a prompt that are always kept.
        recent: Last tokens of a prompt that are always kept.
    """

    distance: Count = 25
    sinks: Whole = 4
    recent: Whole = 1

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        best = ranks(protected(score, seen, self.sinks, self.recent)) < budget[..., None]
        place = torch.arange(score.shape[-1], device=score.device)
        distance = torch.full_like(budget, self.distance).minimum(seen.lengths)
        stop = (score.shape[-1] - distance + 1)[..., None]
        stop = stop.maximum(seen.pad[..., None] + (seen.lengths - budget)[..., None])
        gone = (place < stop) & (place >= stop - (seen.lengths - budget)[..., None])
        settled = (seen.lengths < seen.tokens)[..., None]
        keep = best.where(~settled, ~gone) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)


@dataclass(frozen=True)
class RecentShare(Planner):
    """Give a share of the budget to the latest tokens, and the rest to the highest scores.

    Args:
        share: Share of the budget for the latest tokens, from 0 to 1.
        sinks: First tokens that are always kept, out of the rest.

    Reference: H2O, arXiv 2306.14048, section 5.1, where both shares are equal.
    """

    share: Share = 0.5
    sinks: Whole = 0

    def ends(self, budget: int) -> tuple[int, int]:
        """Return the first tokens, and the share of the latest."""
        return self.sinks, int(budget * self.share + 1e-9)

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        recent = (budget * self.share + 1e-9).floor().long()[..., None]
        rank = ranks(protected(score, seen, self.sinks, recent))
        keep = (rank < budget[..., None]) & seen.valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)


@dataclass(frozen=True)
class Windows(Planner):
    """Keep the last tokens, and before them whole windows, the best ones first.

    The tokens before the last `recent` are cut into windows of `size` from the first token of a
    row on; the last window may be shorter. As many windows are kept as fit the budget.

    Reference: WindowKV, arXiv 2503.17922, section 2.2.1, equation 4: a window is worth the mean of
    all its tokens where a task looks for a place (there called localization), and the mean of its
    best ones where it gathers from all over (aggregation).

    Args:
        size: Tokens of a window.
        recent: Last tokens, always kept (the window whose queries score).
        best: Number of best tokens of a window that count; None for all of them.
    """

    size: Count = 8
    recent: Whole = 8
    best: Count | None = None

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if self.best is not None and self.best > self.size:
            raise ValueError(f"best={self.best}: must be 1 to size={self.size} tokens, or None")

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        width = score.shape[-1]
        place = torch.arange(width, device=score.device)
        from_first = place - seen.pad[..., None]
        valid = seen.valid.expand_as(score)
        recent = (place >= width - self.recent) & valid
        inner = valid & ~recent
        # The same slots from the left, so that every row begins a window where it begins.
        shift = (place + seen.pad[..., None]).clamp_max(width - 1)
        there = inner.gather(2, shift) & (place < seen.lengths[..., None])
        left = score.gather(2, shift).masked_fill(~there, float("-inf"))
        worth = self._worth(left)
        room = (budget - recent.sum(-1)).clamp_min(0) // self.size
        chosen = (ranks(worth) < room[..., None]) & (worth > float("-inf"))
        window = (from_first.clamp_min(0) // self.size).clamp_max(worth.shape[-1] - 1)
        keep = recent | (inner & chosen.gather(2, window))
        keep = keep.where((budget < seen.lengths)[..., None], valid)
        short = self.recent > budget[..., None]  # not even the last tokens fit
        latest = (place >= width - budget[..., None]) & valid
        keep = keep.where(~short | (budget >= seen.lengths)[..., None], latest)
        return torch.where(keep, KEEP, DROP).to(torch.int8)

    def _worth(self, score: Tensor) -> Tensor:
        """Return the worth of every window, [B, H, n]; -inf where it has no tokens."""
        missing = -score.shape[-1] % self.size
        score = torch.nn.functional.pad(score, (0, missing), value=float("-inf"))
        each = score.unflatten(2, (-1, self.size))
        if self.best is not None:
            each = each.topk(self.best, -1).values
        count = (each > float("-inf")).sum(-1)
        total = each.masked_fill(each == float("-inf"), 0.0).sum(-1)
        mean: Tensor = total / count.clamp_min(1)
        return mean.masked_fill(count == 0, float("-inf"))

"""LOOK-M: text before images, and images merged into what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.merge import Merger
from diffcache.kv.merging.absorb import absorb, by_cosine, parted, total
from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner, ranks
from diffcache.kv.score.base import Score
from diffcache.kv.score.revised import Revised
from diffcache.kv.slots import Slots

Way = Literal["averaged", "pivot", "weighted"]


@dataclass(frozen=True)
class NearestMerge(Merger):
    """Merge every evicted slot into the kept key most similar to it.

    With n slots e merged into c: `"averaged"` gives (c + sum of e) / (n + 1), `"pivot"` takes the
    middle of e and c instead of e, `"weighted"` takes e times its cosine.

    Reference: LOOK-M, arXiv 2406.18139, section 3.3.

    Args:
        way: `"averaged"`, `"pivot"` or `"weighted"`.
        space: Whether keys are merged rotated, as the official code does, or unrotated.
    """

    way: Way = "pivot"
    space: Literal["post", "pre"] = "post"

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with the evicted ones merged in, and the plan as it is."""
        slots = seen.slots
        goes, stays = parted(slots, plan)
        if not bool(goes.any()):
            return slots, plan
        match = by_cosine(slots.k, goes, stays)
        ones = torch.ones_like(match.likeness)
        many = total(match, ones, slots.width)
        if self.way == "pivot":
            return absorb(slots, match, ones / 2, 1 + many / 2, 1 + many), plan
        weight = ones if self.way == "averaged" else match.likeness
        return absorb(slots, match, weight, torch.ones_like(many), 1 + many), plan


@dataclass(frozen=True)
class TextFirst(Revised):
    """Rank every token of text before every other one, and equals as another score does.

    Reference: LOOK-M, arXiv 2406.18139, section 3.2.

    Args:
        score: Decides among text and among images.
        text: The tag of text; tokens without a tag, as generated ones, have 0.
    """

    score: Score
    text: int = 0

    def __call__(self, seen: Observation) -> Tensor:
        """Return ranks from 0 to 1, and 2 more for text."""
        place = 1 - ranks(self.said(seen)).float() / max(seen.slots.width, 1)
        return place + 2 * is_text(seen, self.text)


@dataclass(frozen=True)
class AllText(Planner):
    """Keep what another plan keeps, and all text besides.

    This is what the official code does: images are pushed below zero and everything that is not
    below zero is kept, so that a long text holds more slots than the budget allows.

    Reference: LOOK-M, arXiv 2406.18139, official code.

    Args:
        plan: The other.
        text: The tag of text.
    """

    plan: Planner
    text: int = 0

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        plan = self.plan(score, budget, seen)
        return plan.masked_fill(is_text(seen, self.text) & seen.valid & (plan == DROP), KEEP)


def is_text(seen: Observation, text: int) -> Tensor:
    """Return which slots are text, bool [B, 1 or H, S]."""
    return seen.slots.column("tag") == text

"""Recipes for a cache, put together from parts that can be exchanged."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from diffcache.kv.budget import Budget
from diffcache.kv.codec.held import KVCodec
from diffcache.kv.merge import Merger
from diffcache.kv.plan import Planner
from diffcache.kv.positions import PositionMap, Slot
from diffcache.kv.retrieve import Retriever
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Settings
from diffcache.kv.trigger import AfterPrefill, Trigger

Layout = Literal["padded", "flat"]
Space = Literal["post", "pre"]


@dataclass(frozen=True)
class Recipe(Settings):
    """Steps that a cache goes through: `plan` decides by `score` and `budget`, `codec` holds slots.

    Two recipes that say different things compose: `snapkv(budget=256) | kivi(bits=2)`.

    Attributes:
        name: Name of the method.
        score: Score of the worth of each slot.
        budget: Budget of slots that each row may hold.
        plan: Planner that keeps, moves down the ladder or drops each slot, from score and budget.
        merge: Merger of the slots that go into those that are kept.
        codec: Codec of the settled slots.
        ladder: Codecs of the slots that a plan sends to level 1, 2, ...
        retrieve: Retriever, which chooses the slots that a query reads.
        trigger: Trigger, which decides when slots are scored.
        space: Whether keys are held after or before rotary position embedding.
        positions: Numbers that keys are rotated under when they are read; None: their own.
            Under `Slot` keys may be held after rotation as well and are then turned on by the
            difference, which at a generated token is that of the first slots alone.
        layout: Layout of rows of different lengths: without padding, or padded.
        skip: First layers that are left as they are.
    """

    name: str = ""
    score: Score | None = None
    budget: Budget | None = None
    plan: Planner | None = None
    merge: Merger | None = None
    codec: KVCodec | None = None
    ladder: tuple[KVCodec, ...] = ()
    retrieve: Retriever | None = None
    trigger: Trigger | None = None
    space: Space = "post"
    positions: PositionMap | None = None
    layout: Layout = "flat"
    skip: int = 0

    def check(self) -> None:
        """Raise ValueError unless parts go together; scores are asked after a prompt by default."""
        evicting = [getattr(self, name) is not None for name in ("score", "budget", "plan")]
        if any(evicting) != all(evicting):
            raise ValueError(
                f"score={self.score!r}, budget={self.budget!r}, plan={self.plan!r}: give all three of them or none"
            )
        if (self.merge is not None or self.ladder) and not all(evicting):
            raise ValueError(f"{self.name or 'recipe'}: merging and ladders need score, budget and plan")
        if self.merge is not None and self.merge.space == "pre" and self.space != "pre":
            raise ValueError(f"merge={self.merge!r}: merges unrotated keys, which needs space='pre'")
        if self.space != "pre" and not isinstance(self.positions, Slot | None):
            raise ValueError(f"positions={self.positions!r}: keys are rotated anew, which needs space='pre'")
        if self.merge is not None and self.positions is not None and not self.positions.anchored:
            raise ValueError(
                f"positions={self.positions!r}: moves keys that merge={self.merge!r} joins; use Slot(), or None"
            )
        if all(evicting) and self.trigger is None:
            object.__setattr__(self, "trigger", AfterPrefill())

    @cached_property
    def evicts(self) -> bool:
        """Return whether slots are scored at all."""
        return self.score is not None

    @property
    def bounded(self) -> bool:
        """Return whether no more is held however many tokens are generated.

        It is not so where slots are dropped after a prompt and no more or only when asked to, where
        the budget is a share of the tokens, and where what is over budget is coded instead of
        dropped.
        """
        trigger = self.trigger
        drops = trigger is not None and trigger.decoding and trigger.by_itself and not self.ladder
        return self.budget is not None and drops and self.budget.bounded

    @property
    def rotates(self) -> bool:
        """Return whether keys are rotated, or turned on, when they are read."""
        return self.space == "pre" or self.positions is not None

    @cached_property
    def observes(self) -> bool:
        """Return whether it has to see queries."""
        score = self.score
        return score is not None and (score.window > 0 or bool(score.statistics))

    @cached_property
    def notes_attention(self) -> bool:
        """Return whether its score keeps statistics of attention."""
        score = self.score
        return score is not None and score.attends and bool(score.statistics)

    @property
    def wants_out(self) -> bool:
        """Return whether it reads the weights of output projections."""
        parts: tuple[Score | Planner | None, ...] = (self.score, self.plan)
        return any(part is not None and part.wants_out for part in parts)

    def __or__(self, other: Recipe) -> Recipe:
        """Return a recipe that does what both do, or raise ValueError if both say something of the same part."""
        if not isinstance(other, Recipe):
            return NotImplemented
        blank = Recipe()
        changes = {}
        for part in fields(Recipe):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            if part.name == "name" or theirs == getattr(blank, part.name) or theirs == mine:
                continue
            if mine != getattr(blank, part.name):
                raise ValueError(
                    f"{self.name or 'the first'} and {other.name or 'the second'} both set "
                    f"{part.name}: {mine!r} and {theirs!r}; leave it out of one of them"
                )
            changes[part.name] = theirs
        name = " | ".join(filter(None, (self.name, other.name)))
        return replace(self, name=name, **changes)

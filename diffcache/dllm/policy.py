"""Base class of cache policies for diffusion language models, and decoding without a cache."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from diffcache.dllm.decode import Schedule
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.state import State
from diffcache.method import Ability, Method
from diffcache.ranges import Settings


@dataclass(frozen=True)
class FedRows(Ability):
    """Compute the rows that each call's plan names, and serve the keys and values of the others."""

    plans: ClassVar[type[RowPlan]] = RowPlan  # class of the plans


class Policy(Settings, Method):
    """Choice of the rows that each forward of a diffusion language model computes; frozen data.

    A policy keeps nothing between steps, so that one object serves any number of decodings.

    Attributes:
        schedule: Blocks and steps of an answer where nobody says.
        needs_order: Whether `plan` looks at the positions of the coming commit.
        is_local: Whether the rows of a sequence depend on its own place alone, so that others may
            come and go beside it.
    """

    counts_calls: ClassVar[bool] = True
    schedule: ClassVar[Schedule] = Schedule()
    is_local: ClassVar[bool] = False

    @property
    def needs_order(self) -> bool:
        """Return True if `plan` looks at the positions of the coming commit."""
        return False

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute some rows only."""
        return (FedRows(),)

    @abstractmethod
    def plan(self, state: State) -> RowPlan:
        """Return the rows that the next forward computes; the first one has to compute all."""


@dataclass(frozen=True)
class Uncached(Policy):
    """Compute every row at every step: decoding without a cache, through the cache's own paths."""

    is_local: ClassVar[bool] = True

    def plan(self, state: State) -> RowPlan:
        """Return all rows."""
        return ALL

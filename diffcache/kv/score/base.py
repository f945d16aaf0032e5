"""Base of scorers, which give a number to every slot, and say what they need of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.settings import Settings
from diffcache.kv.slots import Slots


class Score(Settings, ABC):
    """Worth of each slot of a layer; a frozen dataclass of settings.

    A scorer never deletes, and it need not care for padding: whatever it says of empty slots
    counts for nothing.
    """

    in_place: ClassVar[bool] = False  # scores each slot wherever it stands, the newest ones last
    by_age: ClassVar[bool] = False  # scores slots by their positions alone, the newest highest
    alike: ClassVar[bool] = False  # scores the slots of all heads alike

    @property
    def window(self) -> int:
        """Number of last queries that are kept for it."""
        return 0

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics it keeps of every slot."""
        return ()

    @property
    def wants_out(self) -> bool:
        """Return whether it reads the weight of the output projection."""
        return False

    @property
    def attends(self) -> bool:
        """Return whether statistics are of attention: `note` is called, and else `enter`."""
        return True

    @property
    def looks_across(self) -> bool:
        """Return whether scores of a layer depend on other layers."""
        return type(self).across is not Score.across

    @abstractmethod
    def __call__(self, seen: Observation) -> Tensor:
        """Return the worth of every slot, [B, H, S] float; higher is kept."""

    def across(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> Sequence[Tensor]:
        """Return the scores [B, H, S] of all layers, given those of each; by default as they are.

        Args:
            scores: Scores of each layer, [B, H, S]; -inf in empty slots.
            seen: Observation of each layer.
        """
        return scores

    def enter(self, stats: dict[str, Tensor], asked: Query, slots: Slots, layer: int) -> None:
        """Take note of tokens as they come, once, in `stats`.

        Args:
            stats: float32 [B, H, n] of the new tokens alone; written to in place.
            asked: Their queries.
            slots: Their slots, keys rotated.
            layer: The layer's number, from 0.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no statistics of tokens as such")

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Take note of how the queries of a forward attended, in `stats`; by default in blocks.

        Args:
            stats: float32 [B, H, S] by the names of `statistics`, 0 at first; written to in place.
            attended: The queries and the slots.
        """
        for part, found, probs in attended.blocks():
            self.track(stats, part, found, probs)

    def track(self, stats: dict[str, Tensor], asked: Query, found: Tensor, probs: Tensor) -> None:
        """Take note of how a block of queries attended, in `stats`.

        Args:
            stats: float32 [B, H, S] by the names of `statistics`, 0 at first; written to in place.
            asked: The queries, those of padding at position -1.
            found: Their logits, [B, H, G, n, S], -inf where unseen.
            probs: Their probabilities, zero for queries of padding.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no statistics")


class LastQueries(Score):
    """Score that looks at the last `size` queries."""

    size: int

    @property
    def window(self) -> int:
        """Number of last queries that are kept for it."""
        return self.size

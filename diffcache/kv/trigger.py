"""Triggers: when a cache is compressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from diffcache.kv.settings import Count, Settings


@dataclass(frozen=True)
class Event:
    """A forward is about to write tokens.

    Attributes:
        coming: Tokens it will write.
        since: Tokens written since the cache was last compressed.
        held: Slots of the longest row of any layer.
        fresh: A prompt was written and not compressed since.
        speculative: Tokens may be taken back, so several at once need not be a prompt.
        seen: Tokens written so far.
    """

    coming: int
    since: int
    held: int
    fresh: bool
    speculative: bool = False
    seen: int = 0


class Trigger(Settings, ABC):
    """Times at which a cache is compressed; a frozen dataclass of settings."""

    decoding: bool = True  # compresses while tokens are generated, so these are observed too
    by_itself: bool = True  # compresses without being asked to

    @abstractmethod
    def due(self, event: Event) -> bool:
        """Return whether the cache is compressed before the coming tokens are written."""


@dataclass(frozen=True)
class AfterPrefill(Trigger):
    """Compress once after each prompt, in however many chunks: before the first single token."""

    decoding = False

    def due(self, event: Event) -> bool:
        """Return whether the prompt has just ended."""
        return event.fresh and (event.coming == 1 or event.speculative)


@dataclass(frozen=True)
class EveryStep(Trigger):
    """Compress before every token that is generated, and after every chunk of a prompt.

    Args:
        every: Tokens from one time to the next.
    """

    every: Count = 1

    def due(self, event: Event) -> bool:
        """Return whether enough tokens came."""
        return event.since >= self.every or (event.fresh and event.coming == 1)


@dataclass(frozen=True)
class Overflow(Trigger):
    """Compress once a row holds more than a number of slots.

    Args:
        slots: Most slots of the longest row.
    """

    slots: Count

    def due(self, event: Event) -> bool:
        """Return whether too many are held."""
        return event.held > self.slots

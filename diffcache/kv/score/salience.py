"""Scores by the attention of a tenth of the queries, and scores that keep queries for others."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import Mass
from diffcache.kv.score.base import Score
from diffcache.kv.score.revised import Revised
from diffcache.kv.settings import Count, SomeShare

_GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly
_MASS = Mass(mean=True)


@dataclass(frozen=True)
class Salience(Score):
    """Score by the mean attention of the probes that could see a slot.

    Half of the probes are the last queries of a prompt, half are spread over all of it. Slots that
    no probe could see yet are worth more than any other.

    Args:
        share: Share of the queries that are probes, above 0 and at most 1.

    Reference: ZipCache, arXiv 2405.14256, where probes are drawn at random;
    here position times golden ratio decides, so that a run can be repeated. Of tokens that come
    one by one, whose last cannot be told in advance, `share` are spread.
    """

    statistics = _MASS.statistics
    share: SomeShare = 0.1

    def __call__(self, seen: Observation) -> Tensor:
        """Return the mean attention, infinite where no probe looked."""
        mean = _MASS(seen)
        return mean.masked_fill(seen.stats["asked"] == 0, float("inf"))

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Add what the probes attended to."""
        total = attended.query.start + attended.query.count
        for part, found, probs in attended.blocks():
            probes = self.probes(part, total)
            if bool(probes.any()):
                _MASS.track(stats, part, found, probs * probes[:, None, None, :, None])

    def probes(self, asked: Query, total: int) -> Tensor:
        """Return which queries are probes, bool [B or 1, n].

        Args:
            asked: The queries.
            total: Tokens up to the last of the forward, whether or not they are still held.
        """
        pos = asked.positions()
        drawn = (pos.double() * _GOLDEN).frac()
        if asked.count == 1:
            return drawn < self.share
        return (drawn < self.share / 2) | (pos >= total * (1 - self.share / 2))


@dataclass(frozen=True)
class WithQueries(Revised):
    """A score, and the last queries kept for a codec that looks at them.

    Args:
        size: Number of last queries that are kept.
        score: Score of the slots.
    """

    size: Count = 32
    score: Score = field(default_factory=Mass)

    @property
    def window(self) -> int:
        """Number of last queries that are kept for it."""
        return max(self.size, self.score.window)

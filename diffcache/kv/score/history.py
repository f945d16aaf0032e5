"""Scores by how slots were attended to so far, other than the plain sum of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from diffcache.kv.attend import Query, visible
from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import Mass
from diffcache.kv.score.base import LastQueries, Score
from diffcache.kv.settings import Count, NotNegative, Positive, Share, SomeShare

IDLE, INTERVAL, BORN = "recurrence.idle", "recurrence.interval", "recurrence.born"
_GLOBAL = Mass(mean=True)
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly
MASS, STEPS = "keyformer.mass", "keyformer.steps"
_MASK = (1 << 32) - 1
_DRAWS = 1 << 20  # of noise in the table


@dataclass(frozen=True)
class LowCount(Score):
    """Count how often the last queries gave a slot less than an even share; few is worth much.

    Reference: Scissorhands, arXiv 2305.17118, algorithm 2. The even share is of the
    slots that a query sees, which is the paper's 1 / t until something is dropped; attention of
    the history is taken over the slots that are held when they are scored; counts of the query
    heads of a key-value head are added.

    Args:
        history: Last queries that are counted.
    """

    history: Count = 400

    @property
    def window(self) -> int:
        """Number of last queries that are kept."""
        return self.history

    def __call__(self, seen: Observation) -> Tensor:
        """Return minus the count, [B, H, S]."""
        asked = seen.last(self.history)
        probs = seen.probs(self.history)
        here = visible(asked, seen.slots.pos) & (asked.positions() >= 0)[:, None, :, None]
        share = here.sum(-1, keepdim=True).clamp_min(1).reciprocal()
        low = (probs < share[:, :, None]) & here[:, :, None]
        return -low.sum((2, 3)).float()


@dataclass(frozen=True)
class Recurrence(Score):
    """Compare how long ago a slot was attended to with the longest it ever waited for that.

    A slot is active at a query that gives it at least `threshold`, and at its own. Its interval is
    the largest number of queries between two times it was active. The score is minus the queries
    since it was last active, divided by its interval: below -1 a slot is overdue.

    Reference: LazyEviction, arXiv 2506.15969. Departure: slots are ordered by the ratio of both
    times alone, where the paper adds a term that prefers short intervals. Times are kept for each
    key-value head, which is active where any of its query heads is; an interval below one query
    counts as one.

    Args:
        threshold: Attention that makes a slot active, 0 to 1.
    """

    statistics = (IDLE, INTERVAL, BORN)  # queries since it was active, its interval, whether it was seen
    threshold: SomeShare = 1e-4

    def __call__(self, seen: Observation) -> Tensor:
        """Return minus waiting time over interval, [B, H, S]."""
        return -seen.stats[IDLE] / seen.stats[INTERVAL].clamp_min(1)

    def track(self, stats: dict[str, Tensor], asked: Query, found: Tensor, probs: Tensor) -> None:
        """Take note of when slots were active."""
        real = probs.sum(-1, keepdim=True) > 0  # a query of padding takes no time
        here = ((found > float("-inf")) & real).any(2)  # [B, H, n, S]
        active = (probs >= self.threshold).any(2) & here
        # Time is counted in queries of the row, 0 for the first of this block.
        time = (real.any(2).cumsum(2) - 1).float().expand(here.shape)
        born = stats[BORN][:, :, None] > 0
        first = here & (here.cumsum(2) == 1) & ~born
        never = torch.full_like(time[:, :, :1], float("-inf"))
        begin = torch.where(born, -1 - stats[IDLE][:, :, None], never)
        stamp = torch.cat([begin, time.where(active | first, never)], 2).cummax(2).values
        gap = (time - stamp[:, :, :-1]).where(active & ~first, 0.0)
        stats[INTERVAL].copy_(torch.maximum(stats[INTERVAL], gap.amax(2)))
        idle = time[:, :, -1] - stamp[:, :, -1]
        stats[BORN].copy_(torch.maximum(stats[BORN], here.any(2).float()))
        stats[IDLE].copy_(idle.where(stats[BORN] > 0, 0.0))


@dataclass(frozen=True)
class GlobalLocal(LastQueries):
    """Score by the attention of all queries and that of the last ones together.

    Sums over all queries favor early slots, which more queries see, so that they are divided by
    the number of those; the last queries favor what is near. Each sums to 1 in every row before
    they are added up.

    Reference: EMS, arXiv 2412.08521. The paper does not say how the two are scaled
    against each other.

    Args:
        size: Last queries that are looked at.
        local: Weight of the last queries, 0 to 1; the rest is that of all queries.
    """

    statistics = _GLOBAL.statistics
    size: Count = 32
    local: Share = 0.5

    def __call__(self, seen: Observation) -> Tensor:
        """Return the weighted sum, [B, H, S]."""
        near = seen.window_mean(seen.probs(self.size)).mean(2)
        return (1 - self.local) * _shares(_GLOBAL(seen), seen) + self.local * _shares(near, seen)

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Add what the queries of a forward attended to."""
        _GLOBAL.note(stats, attended)


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

    statistics = _GLOBAL.statistics
    share: SomeShare = 0.1

    def __call__(self, seen: Observation) -> Tensor:
        """Return the mean attention, infinite where no probe looked."""
        mean = _GLOBAL(seen)
        return mean.masked_fill(seen.stats["asked"] == 0, float("inf"))

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Add what the probes attended to."""
        total = attended.query.start + attended.query.count
        for part, found, probs in attended.blocks():
            probes = self.probes(part, total)
            if bool(probes.any()):
                _GLOBAL.track(stats, part, found, probs * probes[:, None, None, :, None])

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


def _shares(x: Tensor, seen: Observation) -> Tensor:
    """Return [B, H, S] divided by the sums of its rows."""
    x = x.where(seen.valid, 0.0)
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


@dataclass(frozen=True)
class NoisyMass(Score):
    """Add up attention whose logits carry Gumbel noise and are divided by a rising temperature.

    Each query of a prompt has the first temperature; each query that comes alone, as tokens do
    that are generated, has one that is higher by `increment`.

    Reference: Keyformer, arXiv 2403.09054, section 3.3, algorithm 1. The paper raises the
    temperature from 1 to 2 over the T tokens to be generated, which is an `increment` of 1 / T;
    its code adds 0.01 at each step, as is done here. The noise of a query is a stretch of one table
    of 2^20 draws, whose beginning depends on the seed, the head and the query's place among the
    tokens of its row; a slot reads it at its token's place. A row so draws the same noise alone, in
    a padded batch and however slots are held, and little is drawn anew; it is the same in all
    layers. Several drafted tokens that are checked at once share a temperature.

    Args:
        temperature: Temperature of the prompt, dimensionless.
        increment: Rise of the temperature at each generated token, dimensionless.
        noise: Factor of the noise; 0 is none.
        seed: Seed of the noise.
    """

    statistics = (MASS, STEPS)  # the sum, and how many queries came alone
    in_place: ClassVar[bool] = True
    temperature: Positive = 1.0
    increment: NotNegative = 0.01
    noise: NotNegative = 1.0
    seed: int = 0

    def __call__(self, seen: Observation) -> Tensor:
        """Return the sum, [B, H, S]."""
        return seen.stats[MASS]

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Add what the queries of a forward give each slot, mean over the query heads of a head."""
        count = stats[STEPS].amax(-1, keepdim=True)
        if attended.query.count == 1:
            count = count + 1
        stats[STEPS].copy_(count.expand_as(stats[STEPS]))
        heat = (self.temperature + self.increment * count)[:, :, None, None]
        draw = self._drawn(attended) if self.noise else None

        def noisy(found: Tensor, heads: range, part: range) -> Tensor:
            if draw is not None:
                found = found + self.noise * draw(heads, part, found.shape[-1])
            return found / heat[:, heads.start : heads.stop].to(found.dtype)

        stats[MASS] += attended.sums(noisy)

    def _drawn(self, attended: Attended) -> Callable[[range, range, int], Tensor]:
        """Return what gives the noise of heads and queries, for their first slots."""
        query, slots = attended.query, attended.slots
        groups = query.q.shape[1] // slots.k.shape[1]
        pads = torch.zeros(1, dtype=torch.long, device=slots.k.device)
        if attended.padding is not None:
            pads = attended.padding
        asked = (query.positions() - pads[:, None])[:, None, None]  # [B or 1, 1, 1, n]
        place = slots.pos - pads[:, None, None]
        table = _table(self.seed, slots.k.device)

        def draw(heads: range, part: range, upto: int) -> Tensor:
            rows = torch.arange(heads.start * groups, heads.stop * groups, device=table.device)
            rows = _mixed(rows.view(1, -1, groups, 1) + self.seed * 65537)
            first = _mixed(rows + asked[..., part.start : part.stop])
            here = place if place.shape[1] == 1 else place[:, heads.start : heads.stop]
            at = first[..., None] + here[:, :, None, None, :upto]
            return table[at & (_DRAWS - 1)]

        return draw


@lru_cache(maxsize=8)
def _table(seed: int, device: torch.device) -> Tensor:
    """Return numbers of the standard Gumbel distribution, float32 [_DRAWS]."""
    draw = _mixed(_mixed(torch.arange(_DRAWS, device=device)) + seed)
    even = ((draw >> 8).double() + 0.5) / (1 << 24)
    return -(-even.log()).log().float()


def _mixed(x: Tensor) -> Tensor:
    """Return integers of 32 bits that look random (the finalizer of MurmurHash3)."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)

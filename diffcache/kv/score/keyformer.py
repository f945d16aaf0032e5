"""Attention with noise on its logits, summed over queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from diffcache.kv.attended import Attended
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score

MASS, STEPS = "keyformer.mass", "keyformer.steps"
_MASK = (1 << 32) - 1
_DRAWS = 1 << 20  # of noise in the table


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

    Raises:
        ValueError: If a number is out of range.
    """

    in_place: ClassVar[bool] = True
    temperature: float = 1.0
    increment: float = 0.01
    noise: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.increment < 0 or self.noise < 0:
            raise ValueError(
                f"temperature={self.temperature}, increment={self.increment}, noise={self.noise}: "
                "must be above 0, at least 0 and at least 0"
            )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The sum, and how many queries came alone."""
        return (MASS, STEPS)

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

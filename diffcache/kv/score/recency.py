"""Scores that look at neither keys nor values: how recent a slot is, and chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score

_MASK = (1 << 31) - 1


@dataclass(frozen=True)
class Recency(Score):
    """Keep the latest slots.

    Reference: StreamingLLM, arXiv 2309.17453, section 3.2, with the first tokens kept by the plan.
    """

    in_place: ClassVar[bool] = True
    by_age: ClassVar[bool] = True
    alike: ClassVar[bool] = True

    def __call__(self, seen: Observation) -> Tensor:
        """Return the positions, counted from the newest."""
        batch, heads = seen.slots.k.shape[:2]
        pos = seen.slots.pos
        return (pos - pos.amax(-1, keepdim=True)).to(torch.float32).expand(batch, heads, -1)


@dataclass(frozen=True)
class Chance(Score):
    """Keep slots drawn at random, for comparison.

    The number of a slot depends on the seed, the layer, the head and how many tokens of its row
    came before, so that it is the same on every device, in every batch and each time it is asked.

    Reference: none; the baseline that every score has to beat.

    Args:
        seed: Any integer.
    """

    seed: int = 0

    def __call__(self, seen: Observation) -> Tensor:
        """Return a number between 0 and 1 for every slot."""
        pos = seen.slots.pos.long()
        # Padding comes before the tokens of a row and must not shift what they draw.
        index = pos - pos.amax(-1, keepdim=True) - 1 + seen.tokens[..., None]
        head = torch.arange(index.shape[1], device=pos.device)[:, None]
        mixed = _mix(_mix(_mix(index + self.seed % _MASK) + head) + seen.layer)
        return mixed.float() / _MASK


def _mix(x: Tensor) -> Tensor:
    """Scramble integers below 2^31, as in MurmurHash3's last steps, cut to 31 bits."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _MASK
    return x ^ (x >> 16)

"""Scores by the length of values, as they are and behind the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score

_BLOCK = 4096  # slots that are projected at once


@dataclass(frozen=True)
class ValueNorm(Score):
    """Keep the values of the largest norm, for comparison.

    Reference: none; half of what CriticalKV, arXiv 2502.03805, looks at.

    Args:
        power: Power of the norm, 1 or 2.

    Raises:
        ValueError: If `power` is another number.
    """

    power: int = 2

    def __post_init__(self) -> None:
        if self.power not in (1, 2):
            raise ValueError(f"power={self.power}: must be 1 or 2")

    def __call__(self, seen: Observation) -> Tensor:
        """Return the norm."""
        norm: Tensor = seen.slots.v.float().norm(p=self.power, dim=-1)
        return norm


def projected_norm(seen: Observation) -> Tensor:
    """Return the 1-norm of each value behind the output projection, float32 [B, H, S].

    It is the mean over the query heads of a key-value head, each of which has its own columns of
    the projection.

    Args:
        seen: The layer, with the weight of its output projection.

    Raises:
        ValueError: If the weight is not known, or does not fit the values.
    """
    if seen.out is None:
        raise ValueError(
            "the weight of the output projection is not known: use the cache with a model, or give "
            "the store `out`"
        )
    v = seen.slots.v
    heads, size = v.shape[1], v.shape[3]
    if seen.out.shape[1] % (heads * size):
        raise ValueError(
            f"out={list(seen.out.shape)}: must have columns for {heads} key-value heads of values "
            f"of {size} channels"
        )
    weight = seen.out.to(torch.promote_types(v.dtype, torch.float32))
    weight = weight.T.reshape(heads, -1, size, len(weight))  # [H, G, Dv, hidden]
    found = v.new_zeros(v.shape[:3], dtype=weight.dtype)
    for start in range(0, v.shape[2], _BLOCK):
        part = v[:, :, start : start + _BLOCK].to(weight.dtype)
        for group in range(weight.shape[1]):  # one at a time: [B, H, block, hidden] is large
            norm = (part @ weight[:, group]).abs().sum(-1)
            found[:, :, start : start + _BLOCK] += norm / weight.shape[1]
    return found.float()

"""Scores by keys and values alone: how long they are, how unlike, and how much they vary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import ALWAYS
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Count, Several, Whole, one_of

_BLOCK = 4096  # slots that are projected at once


@dataclass(frozen=True)
class KeyNorm(Score):
    """Keep the keys of the smallest Euclidean norm, which rotation does not change.

    Reference: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv
    2406.11430.
    """

    def __call__(self, seen: Observation) -> Tensor:
        """Return minus the norm."""
        norm: Tensor = seen.slots.k.float().norm(dim=-1)
        return -norm


@dataclass(frozen=True)
class KeyDifference(Score):
    """Keep the keys that differ most from the mean direction of all keys of their head.

    Reference: KeyDiff, arXiv 2504.15364.
    """

    def __call__(self, seen: Observation) -> Tensor:
        """Return minus the cosine of a key and the mean of all keys, each of length one."""
        unit = functional.normalize(seen.slots.k.float(), dim=-1)
        mean = (unit * seen.valid[..., None]).sum(2, keepdim=True)
        return -(unit * functional.normalize(mean, dim=-1)).sum(-1)


@dataclass(frozen=True)
class Lag(Score):
    """Rank each slot in its partition of `lag` tokens by how much its channels vary.

    Every channel is brought to 0..1 on the range that it has in the next partition; a slot's score
    is its standard deviation over channels, as a softmax over the partition, the mean of keys and
    values. The first tokens, the last full partition and what is left get the highest rank.

    Reference: LagKV, arXiv 2504.04704. The rank in the partition,
    divided by `lag`, is the score, so that every partition keeps the same share.

    Args:
        lag: Tokens of a partition.
        sinks: First tokens of a row, which are no part of a partition.
    """

    lag: Several = 128
    sinks: Whole = 4

    def __call__(self, seen: Observation) -> Tensor:
        """Return the rank, 0..1, [B, H, S]."""
        score = torch.ones(seen.slots.k.shape[:3], device=seen.slots.k.device)
        for start in seen.pad.unique().tolist():
            parts = (seen.slots.width - start - self.sinks) // self.lag
            if parts < 2:
                continue
            first = start + self.sinks
            stop = first + parts * self.lag
            each = (self._varies(x[:, :, first:stop], parts) for x in (seen.slots.k, seen.slots.v))
            found = torch.stack(list(each)).mean(0)
            rank = found.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
            end = stop - self.lag
            rows = (seen.pad == start)[..., None]
            score[:, :, first:end] = score[:, :, first:end].where(~rows, rank.flatten(2))
        return score

    def _varies(self, x: Tensor, parts: int) -> Tensor:
        """Return the spread of every slot of all partitions but the last, [B, H, P - 1, lag]."""
        x = x.float().unflatten(2, (parts, self.lag))
        low, high = x[:, :, 1:].amin(3, keepdim=True), x[:, :, 1:].amax(3, keepdim=True)
        return ((x[:, :, :-1] - low) / (high - low).clamp_min(1e-9)).std(-1).softmax(-1)


@dataclass(frozen=True)
class NormProduct(Score):
    """Score by the squared norms of key and value, each as a share of its window's sum.

    Reference: Value-Guided KV Compression for LLMs via Approximated CUR Decomposition (CurDKV),
    arXiv 2509.15038, with leverage approximated by norms.

    Args:
        size: Tokens of a window, counted from the first of a row; the last may be shorter.
        sinks: First tokens of a row, which always stay.
    """

    size: Count = 16
    sinks: Whole = 4

    def __call__(self, seen: Observation) -> Tensor:
        """Return the product, of sum 1 in each row, infinite for the first tokens."""
        place = torch.arange(seen.slots.width, device=seen.pad.device)
        from_first = place - seen.pad[..., None]
        there = seen.valid.expand(from_first.shape)
        group = from_first.clamp_min(0) // self.size
        score = torch.ones(from_first.shape, device=place.device)
        for x in (seen.slots.k, seen.slots.v):
            energy = x.float().square().sum(-1) * there
            total = torch.zeros_like(energy).scatter_add_(2, group, energy)
            score = score * energy / total.gather(2, group).clamp_min(1e-30)
        score = functional.normalize(score, p=1, dim=-1)
        return score.masked_fill((from_first < self.sinks) & there, ALWAYS)


@dataclass(frozen=True)
class ValueNorm(Score):
    """Keep the values of the largest norm, for comparison.

    Reference: none; half of what CriticalKV, arXiv 2502.03805, looks at.

    Args:
        power: Power of the norm, 1 or 2.
    """

    power: Annotated[int, one_of(1, 2)] = 2

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
            "the weight of the output projection is not known: use the cache with a model, or give the store `out`"
        )
    v = seen.slots.v
    heads, size = v.shape[1], v.shape[3]
    if seen.out.shape[1] % (heads * size):
        raise ValueError(
            f"out={list(seen.out.shape)}: must have columns for {heads} key-value heads of values of {size} channels"
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

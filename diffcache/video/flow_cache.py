"""FlowCache: tokens that latest frames look at, and of those that are alike only some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.observe import Observation
from diffcache.kv.positions import Absolute
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.attention import pooled
from diffcache.kv.score.base import Score
from diffcache.ranges import Count, Odd, Share
from diffcache.video.policy import VideoPolicy
from diffcache.video.window import rolling


@dataclass(frozen=True)
class FlowCache(VideoPolicy):
    """Hold tokens that are looked at and unlike the others, as many in every head at all times.

    At the start of a chunk every head keeps the tokens of the highest
    `mix importance - (1 - mix) redundancy`. Importance is the mean attention of the latest
    frames, the largest of `kernel` neighbors; redundancy is the softmax over tokens of the mean
    cosine to all others, computed by one sum of all keys.

    The other half of the paper is a feature cache in which each chunk decides for itself which
    steps it skips. Any method does so in a session, whose chunks are runs of their own; the
    released code for SkyReels-V2 takes TeaCache: `diffcache.wrap(transformer, TeaCache(...))`.

    Departures: chunks are denoised one after the other, so that queries are those of the clean pass
    of the latest chunk, where chunks on their way ask in the paper's models; `window` does not
    count the chunk that is made; weights by the age of tokens, which the released code has and
    leaves off, are left out.

    Args:
        window: Frames held beside the chunk, in tokens of any frames.
        mix: Weight of importance, from 0 to 1.
        kernel: Neighbors whose largest importance counts, odd.
        recent: Latest frames that ask.
        select: Whether single tokens are chosen, or whole `frame`s by the mean of their tokens.

    Reference: FlowCache, arXiv 2602.10825 (importance-redundancy KV cache compression), and its
    released code.
    """

    by_head: ClassVar[bool] = True
    window: Count = 12
    mix: Share = 0.07
    kernel: Odd = 7
    recent: Count = 1
    select: Literal["token", "frame"] = "token"

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops tokens of the lowest joint score."""
        group = unit if self.select == "frame" else 1
        held = rolling(self.name, 0, self.window * unit, Absolute())
        return replace(held, score=Joint(self.recent * unit, self.mix, self.kernel, group))


@dataclass(frozen=True)
class Joint(Score):
    """Score by attention, less likeness to all other keys.

    Args:
        size: Latest queries.
        mix: Weight of attention.
        kernel: Neighbors whose largest attention counts.
        group: Tokens that are scored by their mean.

    Reference: FlowCache, arXiv 2602.10825.
    """

    size: int
    mix: float = 0.07
    kernel: int = 7
    group: int = 1

    @property
    def window(self) -> int:
        """Return the number of queries."""
        return self.size

    def __call__(self, seen: Observation) -> Tensor:
        """Return the joint score of every slot, float32 [B, H, S]."""
        mean = seen.mass(self.size) / seen.last(self.size).count
        score = self.mix * pooled(mean, self.kernel, "max")
        score = score - (1 - self.mix) * redundancy(seen.slots.k)
        if self.group == 1:
            return score
        frames: Tensor = score.unflatten(-1, (-1, self.group))
        return frames.mean(-1, keepdim=True).expand_as(frames).flatten(-2)


def redundancy(keys: Tensor) -> Tensor:
    """Return the softmax over keys, `[B, H, S, D]`, of the mean cosine of each to the others, float32 [B, H, S].

    No slot may be empty.
    """
    unit = functional.normalize(keys.float(), dim=-1)
    likeness = torch.einsum("bhsd,bhd->bhs", unit, unit.sum(2)) - 1
    return (likeness / keys.shape[2]).softmax(-1)

"""Ca2-VDM: one cache of clean frames for all denoising steps, of causal temporal attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diffcache.kernels.dense import scaled_dot_product_attention
from diffcache.kv.budget import Uniform
from diffcache.kv.per_layer import per_layer
from diffcache.kv.plan import TopK
from diffcache.kv.positions import Cyclic
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.recency import Recency
from diffcache.kv.trigger import EveryStep
from diffcache.ranges import Count, Settings, Several, Whole
from diffcache.video.policy import VideoPolicy


@dataclass(frozen=True)
class Ca2VDM(VideoPolicy):
    """Hold the latest frames for attention over time, and the last few of them for that over space.

    It is for transformers in which attention over time and over space take turns
    (`diffcache.pipelines.ca2_vdm`). Clean frames are run at timestep 0 and see themselves and those
    before, so that their keys and values are the same in all denoising steps of all chunks. Noisy
    frames see, place by place, all frames of the queue, and in space the last frames before the
    chunk. Temporal positions are added to the features, so that keys keep theirs for ever; frame
    `a` has that of row `a % length`.

    Departures: the queue is cut at the start of the next chunk, where the released code cuts it
    after the write. The last frames for spatial attention may come from several chunks; the
    released code takes them from the chunk before alone, and repeats frames of that if it is
    shorter than `prefix`. A first chunk that is shorter stands for the rest by its first frame, as
    it does in training. The prefix is not perturbed with noise.

    Args:
        queue: Latest frames that temporal attention holds beside the chunk.
        prefix: Latest of them that spatial attention holds.
        length: Frames until temporal positions repeat; the frames that the transformer was trained
            on.

    Raises:
        ValueError: If the queue leaves no room for a chunk.

    Reference: Ca2-VDM, arXiv 2411.16375, and its released code (`kv_cache_max_seqlen`,
    `prev_prefix_3`, `max_tpe_len`).
    """

    queue: Several = 25
    prefix: Count = 3
    length: Count = 33

    def check(self) -> None:
        """Raise ValueError unless prefix and chunk have room."""
        if self.prefix > self.queue:
            raise ValueError(f"prefix={self.prefix}: must be at most queue={self.queue}")
        if self.length <= self.queue:
            raise ValueError(
                f"length={self.length}: must be above queue={self.queue}, so that a chunk has numbers of its own"
            )

    @property
    def room(self) -> int:
        """Frames of the longest chunk that has a temporal position for each frame it sees."""
        return self.length - self.queue

    def recipe(self, unit: int) -> Recipe:
        """Refuse a transformer that attends over time and space at once, with a ValueError."""
        raise ValueError(
            f"policy={self!r}: is for a transformer whose attention over time and over space take "
            "turns; open the session with diffcache.pipelines.ca2_vdm.FactorizedVideo, or choose "
            "another policy"
        )

    def recipes(self, blocks: int) -> Recipe:
        """Return the recipes of the store, with two layers a block of the transformer: over time, over space.

        A token of a layer is a frame; places in the frame are rows of the batch.
        """
        # a budget is of 2 slots or more; with `prefix=1` the older one is not looked at
        pair = [latest("queue", self.queue), latest("prefix", max(self.prefix, 2))]
        return per_layer(pair * blocks)

    def rows(self, start: int, frames: int) -> Tensor:
        """Return the rows of temporal positions of frames that follow one another, int64 [F], no two the same."""
        if frames > self.length:
            raise ValueError(f"frames={frames}: must be at most length={self.length}")
        numbers = torch.arange(start, start + frames)
        return Cyclic(self.length).place(numbers, numbers)


def latest(name: str, frames: int) -> Recipe:
    """Return the recipe that holds the latest frames, with keys as they are written."""
    return Recipe(f"ca2-vdm {name}", score=Recency(), budget=Uniform(frames), plan=TopK(), trigger=EveryStep(1))


class History(Protocol):
    """Frames that a call of the transformer sees beside its own."""

    @property
    def policy(self) -> Ca2VDM:
        """Settings."""

    @property
    def start(self) -> int:
        """Number of the first frame of the call."""

    @property
    def prefix(self) -> int:
        """Count of first frames of the call that are clean at every timestep."""

    def temporal(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention over time in a block, like the queries, keys and values, `[B, S, H, F, D]`.

        A frame sees itself and those before.
        """

    def spatial(self, block: int, q: Tensor, k: Tensor, v: Tensor, beside: bool) -> Tensor:
        """Return attention over space in a block, like the queries, keys and values, `[B, F, H, S, D]`.

        A clean frame sees itself, a noisy one the last frames of the prefix, and itself where it is `beside`.
        """


@dataclass(frozen=True)
class OnePass(Settings):
    """Run a clean prefix and a noisy chunk in one pass, without a cache.

    Training does so, and a rollout that computes its prefix anew in every step.

    Args:
        policy: Settings; the queue is not looked at.
        prefix: Clean frames, the first of the pass.
        start: Number of the first frame.
    """

    policy: Ca2VDM
    prefix: Count
    start: Whole = 0

    def temporal(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention over the frames of the pass."""
        return attention(q, k, v, causal=True)

    def spatial(self, block: int, q: Tensor, k: Tensor, v: Tensor, beside: bool) -> Tensor:
        """Return attention of clean frames to themselves, and of noisy ones to the prefix."""
        sizes = [self.prefix, q.shape[1] - self.prefix]
        clean, noisy = zip(*(x.split(sizes, 1) for x in (q, k, v)), strict=True)
        before = [last_frames(x, self.policy.prefix) for x in clean[1:]]
        parts = [attention(*clean), enhanced(noisy, before, beside)]
        return torch.cat(parts, 1)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Return softmax attention, like the queries `[..., H, n, D]`, to keys and values `[..., H, m, D]`."""
    q4, k4, v4 = (x.flatten(0, -4) for x in (q, k, v))
    out = scaled_dot_product_attention(q4, k4, v4, is_causal=causal)
    return out.reshape(q.shape)


def enhanced(own: tuple[Tensor, ...] | list[Tensor], before: list[Tensor], beside: bool) -> Tensor:
    """Return prefix-enhanced spatial attention of noisy frames, like their own queries, `[B, F, H, S, D]`.

    Keys and values of the last frames of the prefix are `[B, P, H, S, D]`; a frame may see itself `beside`.
    """
    q, *seen = own
    shared = [x.transpose(1, 2).flatten(2, 3)[:, None] for x in before]  # [B, 1, H, P * S, D]
    keys = [x.expand(-1, q.shape[1], -1, -1, -1) for x in shared]
    if beside:
        keys = [torch.cat(pair, -2) for pair in zip(keys, seen, strict=True)]
    return attention(q, *keys)


def last_frames(x: Tensor, count: int) -> Tensor:
    """Return the last frames of `[B, F, ...]`; a first frame stands for those that there are not."""
    index = torch.arange(x.shape[1] - count, x.shape[1], device=x.device).clamp_min(0)
    return x.index_select(1, index)

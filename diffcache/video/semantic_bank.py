"""Semantic bank: what mattered in earlier frames, read again where a prompt is like theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.budget import Uniform
from diffcache.kv.layer import KVLayer
from diffcache.kv.life.on_request import OnRequest
from diffcache.kv.observe import Observation, lengthen
from diffcache.kv.plan import TopK
from diffcache.kv.positions import Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.score.base import Score
from diffcache.kv.slots import chosen
from diffcache.kv.store import KVStore
from diffcache.kv.view import View
from diffcache.ranges import Count, SomeShare, Whole
from diffcache.video.policy import Prompts, VideoPolicy, check_pool

_FAINT, _RECALLED = "faint", "recalled"  # statistics of each slot, 1 or 0


@dataclass(frozen=True)
class SemanticBank(VideoPolicy):
    """Read the latest frames, and of a bank of earlier ones those of the prompt most like this one.

    A frame that leaves the window leaves its salient tokens in the bank: the fewest of its chunk
    that got `mass` of the attention of the chunk to itself, the mean over heads and queries of the
    clean pass. At the start of a chunk, frames of the bank are ranked by the cosine of their prompt
    with the present one, both means over the tokens of the text, and under one prompt by age, the
    latest first. The first `count` are read right before the window.

    Departures: no code was released to compare with, and the paper leaves much open. Entries of the
    bank are frames, where the paper has chunks. After a re-cache all frames count as of the new
    prompt. The paper's training and its noise are of a model of its own.

    Args:
        window: Latest frames that are always read beside the chunk, whole.
        pool: Most frames of the bank.
        sinks: First frames, which stay in the bank for ever, whole.
        count: Frames of the bank that are read; 0 for the window alone.
        mass: Share of the attention that the salient tokens of a chunk got, above 0 to 1; 1 for
            whole frames.

    Reference: after BlockVid, arXiv 2511.22973 (semantic-aware sparse KV cache).
    """

    window: Count = 6
    pool: int = 20
    sinks: Whole = 1
    count: Whole = 6
    mass: SomeShare = 0.98

    def check(self) -> None:
        """Raise ValueError unless the pool has room."""
        check_pool(self.pool, self.sinks, self.count)

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that notes salient tokens; `begin` drops the others, and chooses."""
        return Recipe(
            self.name,
            score=Salience(self.mass),
            budget=Uniform((self.window + self.pool) * unit),
            plan=TopK(),
            retrieve=Recalled(self.window * unit),
            trigger=OnRequest(),
            space="pre",
            positions=Slot(),
        )

    def begin(self, store: KVStore, unit: int, prompts: Prompts = ()) -> None:
        """Leave salient tokens of the frames that left the window, and choose those that are read."""
        if not store.seen:
            return
        first = store.seen - self.window * unit  # of the window
        oldest = first - (self.pool - self.sinks) * unit

        def stays(layer: KVLayer) -> Tensor:
            pos = layer.meta()["pos"][:, :1]
            faint = _statistic(layer, _FAINT)[:, :1] > 0
            return (pos >= first) | (pos < self.sinks * unit) | (~faint & (pos >= oldest))

        if any(not bool(stays(layer).all()) for layer in store.layers):
            store.keep(stays)
        frames = [layer.meta()["pos"][:, :1].div(unit, rounding_mode="floor") for layer in store.layers]
        earlier = torch.cat([frame.flatten() for frame in frames]).unique().long()
        earlier = earlier[(earlier >= 0) & (earlier * unit < first)]
        # Of a frame that others hold, a row may hold no token in any layer.
        there = reduce(torch.logical_or, [(frame[..., None] == earlier).any(2)[:, 0] for frame in frames])
        wanted = earlier[self._ranked(earlier * unit, there, prompts)[:, : self.count]]
        for layer, frame in zip(store.layers, frames, strict=True):
            read = (frame[..., None] == wanted[:, None, None]).any(-1)
            lengthen(layer, (_FAINT, _RECALLED))
            layer.stats[_RECALLED][:] = read.float()

    @staticmethod
    def _ranked(starts: Tensor, there: Tensor, prompts: Prompts) -> Tensor:
        """Return the order of frames by their prompts, then the latest first, int64 [B or 1, n].

        Frames are given by their first tokens, oldest first, int64 [n]; those not `there`, bool like these, come last.
        """
        latest = torch.arange(len(starts) - 1, -1, -1, device=starts.device)[None]
        if not prompts:
            return latest
        begins = torch.tensor([start for start, _ in prompts], device=starts.device)
        means = torch.stack([mean for _, mean in prompts], 1).float()  # [B, P, E]
        like = functional.cosine_similarity(means, means[:, -1:], dim=-1)
        of = (torch.searchsorted(begins, starts, right=True) - 1).clamp_min(0)
        # Rounded, as one prompt has to be equally like itself everywhere.
        like = (like[:, of] * 1e4).round().masked_fill(~there, -torch.inf)
        order = like.flip(1).argsort(dim=1, descending=True, stable=True)
        return latest.expand(len(like), -1).gather(1, order)


@dataclass(frozen=True)
class Salience(Score):
    """Mark the tokens of each chunk that got little of the attention of the chunk to itself.

    Args:
        mass: Share of the attention that the others got.

    Reference: after BlockVid, arXiv 2511.22973.
    """

    mass: float

    @property
    def statistics(self) -> tuple[str, ...]:
        """Return the mark of tokens that may go."""
        return (_FAINT,)

    def __call__(self, seen: Observation) -> Tensor:
        """Return a score that is higher for salient tokens."""
        return -seen.stats[_FAINT]

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Mark tokens of the chunk that asks."""
        width = attended.slots.width
        own = attended.slots.narrow(width - attended.query.count, width)
        found = Attended(attended.query, View(own), attended.valid).sums().mean(1)
        stats[_FAINT][..., -attended.query.count :] = (~salient(found, self.mass))[:, None].float()


def salient(attention: Tensor, mass: float) -> Tensor:
    """Return the fewest tokens that got a share of the attention, `[B, n]`, bool [B, n]; all of them for 1."""
    if mass == 1:
        return torch.ones_like(attention, dtype=torch.bool)
    share, order = (attention.double() / attention.sum(-1, keepdim=True)).sort(-1, descending=True)
    before = share.cumsum(-1) - share  # of the tokens that got more
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < mass)


@final
@dataclass(frozen=True)
class Recalled(Retriever):
    """Read the latest frames, and slots that were chosen at the start of the chunk.

    Args:
        window: Latest tokens that are always read beside the chunk.
    """

    window: int

    def views(self, query: Query, layer: KVLayer, others: Sequence[KVLayer]) -> list[View]:
        """Return what was chosen, the window and the chunk."""
        pos = layer.meta()["pos"][:, :1]
        read = (_statistic(layer, _RECALLED)[:, :1] > 0) | (pos >= query.start - self.window)
        index, there = chosen(read & (pos >= 0))
        is_full = len(there) == 1 or bool(there.all())  # rows that were filled up have slots that nothing sees
        return [View(layer.rotated(layer.read().gather(index, there)), below=layer.seen if is_full else None)]


def _statistic(layer: KVLayer, name: str) -> Tensor:
    """Return a statistic of all slots, 0 where nothing was noted, [B, H, S] or [1, 1, S]."""
    found = layer.stats.get(name)
    if found is None:
        return layer.meta()["pos"].new_zeros(1, 1, layer.held)
    return functional.pad(found, (0, layer.held - found.shape[2]))

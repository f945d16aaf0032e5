"""Geometry of the keys, and attention in chunks without a mask: neither needs a question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import ALWAYS
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Count, Mode, NotNegative, Whole

_RIDGE = 0.01  # added to the Gram matrix of sketched keys


@dataclass(frozen=True)
class Compactor(Score):
    """Score by leverage of the keys plus attention of chunks to themselves, both ways in time.

    Leverage says which keys, before rotation, others do not span; the attention is of each chunk
    of queries to its own keys, without a mask, times the norm of the value, averaged over three
    neighbors. Both are brought to mean 0 and deviation 1 over the slots and heads of a row.

    Reference: Compactor, arXiv 2507.08143. `mode="official"` is the last chunk as in
    the code of kvpress, where what is missing in it counts as keys and queries of zero; in
    `"paper"` it counts for nothing.

    Args:
        blend: Weight of leverage; 0 leaves it out. The paper takes the share that is dropped.
        attention: Weight of attention; 0 leaves it out, and then no queries are kept.
        chunk: Tokens of a chunk.
        queries: Last queries of the prompt that are kept; older slots get no attention.
        sketch: Size of the random projection of keys; 0 takes the keys themselves.
        first: First tokens of a row, which always stay.
        last: Last tokens of a row, which always stay.
        seed: Seed of the projection.
        mode: `"paper"` or `"official"`.
    """

    blend: NotNegative = 0.5
    attention: NotNegative = 1.0
    chunk: Count = 256
    queries: Count = 4096
    sketch: Whole = 48
    first: Whole = 8
    last: Whole = 4
    seed: int = 0
    mode: Mode = "paper"

    @property
    def window(self) -> int:
        """Number of last queries that are kept for it."""
        return self.queries if self.attention else 0

    def __call__(self, seen: Observation) -> Tensor:
        """Return the blend, infinite at both ends, [B, H, S]; ValueError if the keys' rotation is not known."""
        place = torch.arange(seen.slots.width, device=seen.pad.device)
        inner = (place >= seen.pad[..., None] + self.first) & (place < len(place) - self.last)
        inner = inner & seen.valid
        score = torch.zeros(inner.shape, device=inner.device)
        if self.blend:
            score = self.blend * standard(self._leverage(seen, inner), inner)
        if self.attention:
            score = score + self.attention * standard(self._chunks(seen, inner), inner)
        return score.masked_fill(~inner, ALWAYS)

    def _leverage(self, seen: Observation, inner: Tensor) -> Tensor:
        if seen.rotary is None:
            raise ValueError("rotary=None: the rotation is known with space='pre' only; set it")
        k = seen.rotary.unrotate(seen.slots.k.float(), seen.slots.rpos)
        if self.sketch:
            generator = torch.Generator().manual_seed(self.seed)
            shape = (k.shape[1], k.shape[-1], self.sketch)
            drawn = torch.randn(shape, generator=generator) * self.sketch**-0.5
            return leverage(k, inner, drawn.to(k.device))
        return leverage(k, inner)

    def _chunks(self, seen: Observation, inner: Tensor) -> Tensor:
        """Return the attention in chunks times the values' norms, pooled."""
        asked, slots = seen.asked, seen.slots
        newest = asked.positions()[:, -1:, None]
        index = asked.count - 1 - (newest - slots.pos)
        known = inner & (index >= 0)
        index = index.clamp(0, asked.count - 1).expand(inner.shape)
        q = asked.grouped(slots.k.shape[1]).float()
        wide = index[:, :, None, :, None].expand(-1, -1, q.shape[2], -1, q.shape[-1])
        q = q.gather(3, wide) * known[:, :, None, :, None]
        start = (seen.pad + self.first)[..., None]
        place = torch.arange(slots.width, device=start.device)
        to = (place + start).clamp_max(slots.width - 1)  # chunks begin where the row does
        there = known.gather(2, to) & (place + start < slots.width)
        mass = self._attend(_moved(q, to[:, :, None]), _moved(slots.k.float(), to), there)
        value = _moved(slots.v.float(), to).norm(dim=-1) * there
        pooled = functional.avg_pool1d(mass * value, 3, 1, 1)
        return pooled.gather(2, (place - start).clamp_min(0))

    def _attend(self, q: Tensor, k: Tensor, there: Tensor) -> Tensor:
        """Return what slots [B, H, S] get from the queries of their chunk, mean over G."""
        missing, chunks = -k.shape[2] % self.chunk, (-1, self.chunk)
        q, k = (functional.pad(x, (0, 0, 0, missing)).unflatten(-2, chunks) for x in (q, k))
        both = functional.pad(there, (0, missing)).unflatten(-1, chunks)
        found = torch.einsum("bhgnqd,bhnkd->bhgnqk", q, k)
        pair = (both[..., :, None] & both[..., None, :])[:, :, None]
        if self.mode == "official":
            probs = found.masked_fill(~pair, 0.0).softmax(-1)
        else:
            probs = found.masked_fill(~pair, float("-inf")).softmax(-1).nan_to_num(0.0)
        return probs.sum(-2).mean(2).flatten(2)[..., : there.shape[-1]]


def leverage(keys: Tensor, counts: Tensor, sketch: Tensor | None = None) -> Tensor:
    """Return how far each key is from being a mix of the others, 0..1, [B, H, S].

    Args:
        keys: Keys before rotation, [B, H, S, D].
        counts: True for slots that hold a key, bool [B, H, S]; the others get 0.
        sketch: Projection of the keys, [H, D, d]; None takes the keys themselves.
    """
    there = counts[..., None].to(keys.dtype)
    mean = (keys * there).sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp_min(1)
    x = (keys - mean) * there
    if sketch is not None:
        x = x @ sketch.to(x.dtype)
    gram = x.mT @ x + _RIDGE * torch.eye(x.shape[-1], device=x.device, dtype=x.dtype)
    factor = torch.linalg.cholesky(gram)
    solved: Tensor = torch.linalg.solve_triangular(factor, x.mT, upper=False)
    return solved.square().sum(-2)


def standard(score: Tensor, counts: Tensor) -> Tensor:
    """Return scores [B, H, S] of mean 0 and deviation 1 over the heads and slots that count."""
    there = counts.to(score.dtype)
    count = there.sum((1, 2), keepdim=True).clamp_min(1)
    away = (score - (score * there).sum((1, 2), keepdim=True) / count) * there
    spread = (away.square().sum((1, 2), keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    return away / spread.clamp_min(1e-12)


def _moved(x: Tensor, index: Tensor) -> Tensor:
    """Return slots [..., S, D] in the order of an index [..., S]."""
    return x.gather(-2, index[..., None].expand(*x.shape))

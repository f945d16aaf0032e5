"""KVCrush: part of the budget goes to slots that differ from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner, ranks
from diffcache.kv.settings import Count, Mode, Share, Whole

Anchor = Literal["random", "zeros", "ones", "mean", "alternating"]
_ANCHORS = ("random", "zeros", "ones", "mean", "alternating")


@dataclass(frozen=True)
class Diversity(Planner):
    """Keep the best, and of the others some that are spread evenly over how different they are.

    Each unit is a vector of bits. Units that the scores would drop are sorted by the Hamming
    distance of theirs to an anchor, and representatives are taken at even steps.

    Reference: KVCrush, arXiv 2503.00022.

    Args:
        share: Share of the budget beside first and last tokens that representatives get, 0 to 1.
        anchor: Vector that distances are taken to: `"random"`, `"zeros"`, `"ones"`, the `"mean"`
            of the units, or `"alternating"` bits.
        mode: `"paper"`: a unit is a token, and a bit says for each head whether the token is among
            its best; all heads keep the same tokens. `"official"`, as OpenVINO GenAI does it: a
            unit is a block of tokens, and a bit says for each token whether it scores above the
            median; each head by itself, in whole blocks.
        block: Tokens of a block in official mode.
        sinks: First tokens that are always kept.
        recent: Last tokens that are always kept.
        seed: Seed of the random anchor.
    """

    share: Share = 0.25
    anchor: Anchor = "random"
    mode: Mode = "paper"
    block: Count = 16
    sinks: Whole = 0
    recent: Whole = 0
    seed: int = 0

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped; whole rows that fit are left alone."""
        width, pad = score.shape[-1], seen.pad[..., None]
        place = torch.arange(width, device=score.device)
        valid = seen.valid.expand(score.shape)
        order = place - pad
        edge = valid & ((order < self.sinks) | (place >= width - self.recent))
        # Where the edges alone are too much, the latest of them stay.
        edge &= ranks(place.expand_as(order).float().masked_fill(~edge, -1)) < budget[..., None]
        room = budget - edge.sum(-1)
        inner = valid & (order >= self.sinks) & (place < width - self.recent)
        if self.mode == "paper":
            kept = self._tokens(score, budget, room, inner)
        else:
            kept = self._blocks(score, room, inner, order - self.sinks)
        fits = (seen.lengths <= budget)[..., None]
        keep = (edge | (kept & inner) | fits) & valid
        return torch.where(keep, KEEP, DROP).to(torch.int8)

    def _tokens(self, score: Tensor, budget: Tensor, room: Tensor, inner: Tensor) -> Tensor:
        """Return the tokens that are kept, the same in all heads, bool [B, H, S]."""
        worth = score.masked_fill(~inner, float("-inf"))
        bits = (ranks(worth) < room[..., None]).transpose(1, 2)[:, None]  # [B, 1, S, H]
        mean = score.where(inner, 0).mean(1, keepdim=True)
        there = inner.all(1, keepdim=True)
        return self._picked(mean, bits, there, room.amin(1, keepdim=True)).expand_as(score)

    def _blocks(self, score: Tensor, room: Tensor, inner: Tensor, order: Tensor) -> Tensor:
        """Return the tokens of kept blocks, bool [B, H, S]."""
        count = -(-score.shape[-1] // self.block)
        worth = score.where(inner, torch.nan)
        above = inner & (score > worth.nanmedian(-1, keepdim=True).values)
        cell = order.where(inner, count * self.block)  # those at the edges go to a spare block
        shape = (*score.shape[:2], count * self.block + 1)
        bits = torch.zeros(shape, dtype=torch.bool, device=score.device)
        bits.scatter_(2, cell, above)
        filled = torch.zeros_like(bits).scatter_(2, cell, inner)
        total = torch.zeros(shape, dtype=score.dtype, device=score.device)
        total.scatter_(2, cell, score.where(inner, 0))
        bits, filled, total = (x[..., :-1].unflatten(2, (count, self.block)) for x in (bits, filled, total))
        units = self._picked(total.sum(-1), bits, filled.any(-1), room // self.block)
        home = (cell // self.block).clamp_max(count - 1)
        return units.gather(2, home)

    def _picked(self, worth: Tensor, bits: Tensor, there: Tensor, want: Tensor) -> Tensor:
        """Return the units that are kept.

        Args:
            worth: [B, h, U].
            bits: bool [B, h, U, m].
            there: bool [B, h, U].
            want: Units a row may keep, int64 [B, h].
        """
        want = want.clamp_min(0)
        many = (want * self.share + 0.5).floor().long()
        best = (ranks(worth.masked_fill(~there, float("-inf"))) < (want - many)[..., None]) & there
        left = there & ~best
        distance = (bits != self._anchor(bits, left)[..., None, :]).sum(-1)
        far = bits.shape[-1] + 1
        order = torch.argsort(distance.where(left, far), dim=-1, stable=True)
        place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(-1, order, place)
        return best | (left & evenly(rank, left.sum(-1, keepdim=True), many[..., None]))

    def _anchor(self, bits: Tensor, left: Tensor) -> Tensor:
        """Return what distances are taken to, bool [B or 1, h or 1, m]."""
        size = bits.shape[-1]
        if self.anchor == "mean":
            ones = (bits & left[..., None]).sum(-2)
            return 2 * ones >= left.sum(-1, keepdim=True).clamp_min(1)
        if self.anchor == "random":
            drawn = torch.Generator().manual_seed(self.seed)
            return torch.randint(0, 2, (1, 1, size), generator=drawn).bool().to(bits.device)
        if self.anchor == "alternating":
            return (torch.arange(size, device=bits.device) % 2).bool()[None, None]
        return torch.full((1, 1, size), self.anchor == "ones", device=bits.device)


def evenly(rank: Tensor, count: Tensor, want: Tensor) -> Tensor:
    """Return which of `count` ranks are taken if `want` are, at even steps from the first.

    Args:
        rank: int64, from 0.
        count: Number of ranks there are.
        want: Number of ranks that are taken; all, where there are no more.
    """
    count = count.clamp_min(1)
    step = (rank * want + count - 1) // count  # the step that would be the first to reach a rank
    return ((step < want) & (step * count // want.clamp_min(1) == rank)) | (want >= count)

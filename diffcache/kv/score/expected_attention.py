"""Scores by the attention that queries to come are expected to pay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.rotary import Rotation
from diffcache.kv.score.base import LastQueries
from diffcache.kv.settings import Count, NotNegative, Whole


@dataclass(frozen=True)
class Expected(LastQueries):
    """Score by the attention of queries drawn like the last ones, at the positions to come.

    Queries before rotation are taken as normally distributed; their mean and covariance are turned
    by the mean rotation of the positions to come, which gives the expected exponential of a key's
    logit in closed form. Needs keys held before rotation, which is how it knows the rotation.

    Args:
        size: Last queries that are looked at.
        future: Positions to come.
        sinks: First tokens, which always stay, and whose queries are left out.
        covariance: Look at the covariance too.
        values: Multiply by the norm of the value.
        epsilon: Number added before that; dimensionless.

    Reference: Expected Attention, arXiv 2510.00636. Departure: the
    last `size` queries stand for all, so that they need not be kept.
    """

    size: Count = 1024
    future: Count = 512
    sinks: Whole = 4
    covariance: bool = True
    values: bool = True
    epsilon: NotNegative = 0.0

    def __call__(self, seen: Observation) -> Tensor:
        """Return the expected attention, infinite for the first tokens."""
        if seen.rotary is None:
            raise ValueError("rotary=None: the rotation is known with space='pre' only; set it")
        place = torch.arange(seen.slots.width, device=seen.pad.device) - seen.pad[..., None]
        first = (place < self.sinks)[:, :, None]
        mean, spread = self._queries(seen, seen.rotary)
        k = seen.slots.k.float()[:, :, None]
        scale = seen.asked.scale
        found = (k * mean[..., None, :]).sum(-1) * scale
        if self.covariance:
            found = found + ((k @ spread) * k).sum(-1) * scale**2 / 2
        hidden = first | ~seen.valid[:, :, None]
        probs = found.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0).mean(2)
        if self.values:
            probs = (probs + self.epsilon) * seen.slots.v.float().norm(dim=-1)
        return probs.masked_fill(first[:, :, 0], float("inf"))

    def _queries(self, seen: Observation, rotary: Rotation) -> tuple[Tensor, Tensor]:
        """Return mean [B, H, G, D] and covariance [B, H, G, D, D] of the queries to come."""
        asked = seen.asked
        pos = asked.positions()
        # Padding shifts positions of the text, and not those of rotation.
        newest = seen.slots.pos[:, 0, -1:].long()
        shift = newest - seen.slots.rpos[:, 0, -1:].long()
        q = rotary.unrotate(asked.q.float(), (pos - shift).clamp_min(0)[:, None])
        q = q.unflatten(1, (seen.slots.k.shape[1], -1))
        index = pos - newest - 1 + seen.tokens[:, :1]
        used = ((pos >= 0) & (index >= self.sinks)).float()
        weight = (used / used.sum(-1, keepdim=True).clamp_min(1))[:, None, None, :, None]
        mean = (q * weight).sum(3)
        centered = q - mean[:, :, :, None]
        spread = centered.mT @ (centered * weight)
        turn = self._turn(rotary, newest - shift, q.shape[-1], q)[:, None, None]
        return (mean[..., None, :] @ turn)[..., 0, :], turn.mT @ spread @ turn

    def _turn(self, rotary: Rotation, newest: Tensor, size: int, like: Tensor) -> Tensor:
        """Return the mean rotation of the positions to come, [B, D, D], for rows of vectors."""
        units = torch.eye(size, device=like.device, dtype=like.dtype)
        ahead = torch.arange(1, self.future + 1, device=like.device)
        rows = [
            rotary.rotate(units[None, :, None].expand(-1, -1, self.future, -1), last + ahead) for last in newest[:, 0]
        ]
        return torch.cat(rows).mean(2)

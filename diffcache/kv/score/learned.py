"""Locret: a small network says once, when a token is written, how much it will matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from diffcache.kv.attend import Query
from diffcache.kv.observe import Observation
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Settings
from diffcache.kv.slots import Slots

_NAME = "locret"


@dataclass(frozen=True, eq=False)
class RetainingHeads(Settings):
    """Trained weights, a network of two layers for each layer of the model.

    Attributes:
        first: [L, Hq * D + H * D + H * Dv, W], W the width of the network.
        second: [L, W, H].
    """

    first: Tensor
    second: Tensor

    def check(self) -> None:
        """Raise ValueError unless shapes go together."""
        if self.first.dim() != 3 or self.second.shape[:2] != self.first.shape[::2]:
            raise ValueError(
                f"first={list(self.first.shape)}, second={list(self.second.shape)}: must be "
                "[L, channels, W] and [L, W, H]"
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Return the worth of tokens, [B, H, n] float32.

        Args:
            q: [B, Hq, n, D].
            k: [B, H, n, D].
            v: [B, H, n, Dv].
            layer: Number of the layer, from 0.

        Raises:
            ValueError: If the networks are for another model.
        """
        x = torch.cat([each.transpose(1, 2).flatten(2) for each in (q, k, v)], -1).float()
        if layer >= len(self.first) or x.shape[2] != self.first.shape[1]:
            raise ValueError(
                f"layer {layer} with {x.shape[2]} channels: the retaining heads are "
                f"{list(self.first.shape)}, which is [layers, channels, width]; train them for "
                "this model"
            )
        first, second = (each[layer].to(x.device, x.dtype) for each in (self.first, self.second))
        return (silu(x @ first) @ second).transpose(1, 2)

    def __repr__(self) -> str:
        """Return shapes, as numbers would not be read."""
        return f"RetainingHeads(first={list(self.first.shape)}, second={list(self.second.shape)})"


@dataclass(frozen=True)
class Retained(Score):
    """Score each token once, when it is written, from its query, key and value.

    The score never changes, so that it does not matter when slots go.

    Reference: Locret, arXiv 2410.01805, section 3.3. Queries and keys are taken rotated, as the
    cache meets them, and the nonlinearity is SiLU.

    Args:
        heads: Networks that `diffcache.kv.learn.locret.train` returned.
    """

    statistics = (_NAME,)
    attends = False
    heads: RetainingHeads

    def __call__(self, seen: Observation) -> Tensor:
        """Return what was noted when each token came, or raise ValueError if nothing was."""
        if _NAME not in seen.stats:
            raise ValueError("no token was scored: the cache must be used through attention")
        return seen.stats[_NAME]

    def enter(self, stats: dict[str, Tensor], asked: Query, slots: Slots, layer: int) -> None:
        """Score new tokens."""
        stats[_NAME].copy_(self.heads(asked.q, slots.k, slots.v, layer))

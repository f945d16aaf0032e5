"""Layers as mergers see them, drawn at random, with padding."""

from typing import Any

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.slots import Slots


def layer(pads: Any = (0, 3), heads: int = 2, width: int = 14, size: int = 4, seed: int = 0) -> Observation:
    """Return a layer whose rows begin with so many empty slots, float64."""
    drawn = torch.Generator().manual_seed(seed)
    k = torch.randn(len(pads), heads, width, size, generator=drawn, dtype=torch.float64)
    v = torch.randn(len(pads), heads, width, size + 1, generator=drawn, dtype=torch.float64)
    pos = torch.arange(width, dtype=torch.int32).expand(len(pads), 1, -1).clone()
    for row, pad in enumerate(pads):
        pos[row, :, :pad] = -1
    tokens = torch.tensor([[width - pad] * heads for pad in pads])
    return Observation(0, 1, Slots(k, v, {"pos": pos}), {}, tokens)


def of(k: Tensor, v: Tensor | None = None, **meta: Tensor) -> Observation:
    """Return a layer of these keys [B, H, S, D], without padding."""
    pos = torch.arange(k.shape[2], dtype=torch.int32).expand(len(k), 1, -1)
    tokens = torch.full(k.shape[:2], k.shape[2])
    return Observation(0, 1, Slots(k, k if v is None else v, {"pos": pos, **meta}), {}, tokens)


def scores(seen: Observation, seed: int = 1) -> Tensor:
    """Return random scores, -inf in empty slots."""
    drawn = torch.rand(seen.slots.k.shape[:3], generator=torch.Generator().manual_seed(seed))
    return drawn.masked_fill(~seen.valid, float("-inf"))


def plan(seen: Observation, score: Tensor, keep: int) -> Tensor:
    """Return a plan that keeps the best slots."""
    order = score.argsort(-1, descending=True).argsort(-1)
    return torch.where((order < keep) & seen.valid, 0, -1).to(torch.int8)


def alone(seen: Observation, row: int) -> tuple[Observation, int]:
    """Return one row without its padding, and how much that was."""
    pad = int((seen.slots.pos[row, 0] < 0).sum())
    slots = seen.slots
    meta = {name: value[row : row + 1, :, pad:] for name, value in slots.meta.items()}
    stats = {name: value[row : row + 1, :, pad:] for name, value in seen.stats.items()}
    cut = Slots(slots.k[row : row + 1, :, pad:], slots.v[row : row + 1, :, pad:], meta)
    return Observation(seen.layer, seen.layers, cut, stats, seen.tokens[row : row + 1]), pad


def check(merge: object, seen: Observation, score: Tensor, found: Tensor) -> None:
    """Assert what holds of every merger: nothing to drop changes nothing; rows stand alone."""
    every = torch.where(seen.valid, 0, -1).to(torch.int8).expand_as(found)
    slots, same = merge(seen, score, every)  # type: ignore[operator]
    assert slots.k is seen.slots.k and slots.v is seen.slots.v
    assert slots.meta.keys() == seen.slots.meta.keys()
    assert torch.equal(same, every)
    whole, plan_of = merge(seen, score, found)  # type: ignore[operator]
    assert not (plan_of >= 0)[~seen.valid.expand_as(found)].any()
    for row in range(len(score)):
        one, pad = alone(seen, row)
        cut = slice(row, row + 1), slice(None), slice(pad, None)
        slots, mine = merge(one, score[cut], found[cut])  # type: ignore[operator]
        assert torch.equal(mine, plan_of[cut])
        for a, b in ((slots.k, whole.k[cut]), (slots.v, whole.v[cut])):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for name in slots.meta.keys() - {"pos"}:
            torch.testing.assert_close(slots.meta[name], whole.meta[name][cut])

"""Observations and stores made by hand, for tests of scores, budgets and plans."""

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.observe import Observation
from diffcache.kv.rotary import Rotary
from diffcache.kv.slots import Slots
from tests.kv.kvpress_golden import HEADS, LAYERS, golden


def observed(
    k: Tensor, v: Tensor, q=None, *, window: int = 8, pad: int = 0, out=None, layer: int = 0, layers: int = 2
):
    """Return what scorers see of one layer [B, H, S, D], with padding put before its tokens."""
    batch, heads, width = k.shape[:3]
    pos = torch.arange(width, dtype=torch.int32) + pad
    pos = torch.cat([torch.full((pad,), -1, dtype=torch.int32), pos]).expand(batch, 1, -1)
    k, v = (torch.cat([100 + torch.randn(*x.shape[:2], pad, x.shape[3]), x], 2) for x in (k, v))
    asked = None
    if q is not None:
        few = q[:, :, -window:]
        start = pad + width - few.shape[2]
        asked = Query(few, start, q.shape[-1] ** -0.5, pos=torch.arange(start, pad + width)[None])
    tokens = torch.full((batch, heads), width)
    return Observation(layer, layers, Slots(k, v, {"pos": pos}), {}, tokens, asked, out)


def stored(layer: int, *, window: int = 8, pad: int = 0) -> Observation:
    """Return what scorers see of a layer of the golden file, with the rotation of its model."""
    tensors, _ = golden()
    k, v, q = (tensors[name][layer] for name in "kvq")
    wo = tensors["wo"][layer]
    seen = observed(k, v, q, window=window, pad=pad, out=wo, layer=layer, layers=LAYERS)
    seen.slots.meta["rpos"] = (seen.slots.pos - pad).clamp_min(0)  # as a model counts positions of a padded row
    seen.rotary = Rotary(tensors["inv_freq"])
    return seen


def held(lengths: list[int], tokens: int | None = None, layers: int = 1) -> list[Observation]:
    """Return layers whose rows hold so many slots, right-aligned, of as many tokens or of `tokens`."""
    width = max(lengths)
    pos = torch.arange(width).expand(len(lengths), 1, -1) - (width - torch.tensor(lengths))[:, None, None]
    pos = pos.clamp_min(-1).to(torch.int32)
    empty = torch.zeros(len(lengths), HEADS, width, 2)
    seen = torch.tensor(lengths) if tokens is None else torch.full((len(lengths),), tokens)
    slots, each = Slots(empty, empty, {"pos": pos}), seen[:, None].expand(-1, HEADS)
    return [Observation(index, layers, slots, {}, each) for index in range(layers)]


def golden_score(name: str) -> Tensor:
    """Return kvpress' score [L, B, H, S]."""
    return golden()[0][f"score.{name}"]


def golden_kept(name: str, percent: int) -> Tensor:
    """Return the slots that kvpress keeps at a ratio removed, bool [L, B, H, S]."""
    return golden()[0][f"kept.{name}.{percent}"]

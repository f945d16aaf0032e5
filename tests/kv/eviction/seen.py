"""Observations and stores made by hand, for tests of scores, budgets and plans."""

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.observe import Observation
from diffcache.kv.slots import Slots
from tests.kv.kvpress_golden import LAYERS, golden


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
    """Return what scorers see of a layer of the golden file."""
    tensors, _ = golden()
    k, v, q = (tensors[name][layer] for name in "kvq")
    wo = tensors["wo"][layer]
    return observed(k, v, q, window=window, pad=pad, out=wo, layer=layer, layers=LAYERS)


def golden_score(name: str) -> Tensor:
    """Return kvpress' score [L, B, H, S]."""
    return golden()[0][f"score.{name}"]


def golden_kept(name: str, percent: int) -> Tensor:
    """Return the slots that kvpress keeps at a ratio removed, bool [L, B, H, S]."""
    return golden()[0][f"kept.{name}.{percent}"]

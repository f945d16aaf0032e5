"""Observations and stores made by hand, for tests of scores, budgets and plans."""

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.observe import Observation
from diffcache.kv.recipe import Recipe
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore
from tests.kv.kvpress_golden import GROUPS, HEADS, LAYERS, SIZE, TOKENS, golden


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


def filled(recipe: Recipe, tokens: int = TOKENS, layers: int = 2, dtype=torch.float32, size: int = SIZE, out=False):
    """Return a store of random tokens that were attended to as a prompt is."""
    weights = [torch.randn(32, HEADS * GROUPS * size, dtype=dtype) for _ in range(layers)]
    store = KVStore(layers, recipe, out=weights if out else None)
    store.begin(tokens)
    for index in range(layers):
        feed(store, index, tokens, HEADS, GROUPS, size, dtype)
    return store


def feed(store: KVStore, index: int, tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> Tensor:
    """Write random tokens to a layer and attend to it."""
    layer = store.layers[index]
    start = layer.seen
    layer.write(*(torch.randn(1, heads, tokens, size, dtype=dtype) for _ in "kv"))
    q = 2 * torch.randn(1, heads * groups, tokens, size, dtype=dtype)
    return store.attend(index, Query(q, start, size**-0.5))

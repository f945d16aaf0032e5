"""Random keys and values, and how they are written into a store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.store import KVStore

SIZE = 8


def draw(count: int, seed: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 2, count, SIZE, generator=torch.Generator().manual_seed(seed))


def write(store: KVStore, k: Tensor, v: Tensor, q: Tensor | None = None, **more: Any) -> None:
    store.begin(k.shape[2])
    for layer in store.layers:
        start = layer.seen
        layer.write(k, v, **more)
        if q is not None:
            store.attend(layer.index, Query(q, start, SIZE**-0.5), more.get("valid"))

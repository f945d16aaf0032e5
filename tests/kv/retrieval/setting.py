"""Layers of random keys, and every retriever with small settings."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.a2ats import KeyCodes
from diffcache.kv.retrieval.double_sparsity import LabelChannels
from diffcache.kv.retrieval.mpcache import MinMaxTree
from diffcache.kv.retrieval.probe_query import ProbeQuery
from diffcache.kv.retrieval.quest import Quest
from diffcache.kv.retrieval.rekv import Frames
from diffcache.kv.retrieval.select import Selecting
from diffcache.kv.retrieval.sentence import Sentences
from diffcache.kv.retrieval.shadowkv import Landmarks
from diffcache.kv.retrieval.tidal import LayerReuse
from diffcache.kv.rotary import Rotary
from diffcache.kv.settings import Size

B, H, G, D = 2, 2, 3, 16
HALF = ((0, 3, 5, 6, 9, 11, 12, 15), (1, 2, 4, 7, 8, 10, 13, 14))
FEW = {"sinks": 2, "recent": 8}

MADE: dict[str, Callable[[Size], Selecting]] = {
    "quest": lambda n: Quest(n, **FEW),
    "quest_mean": lambda n: Quest(n, group="mean", page=4, **FEW),
    "mpcache": lambda n: MinMaxTree(n, **FEW),
    "double_sparsity": lambda n: LabelChannels(n, channels=(HALF,) * 4, **FEW),
    "tidal": lambda n: LayerReuse(n, select=(0, 2), **FEW),
    "sentence": lambda n: Sentences(n, block=8, **FEW),
    "rekv": lambda n: Frames(n, block=8, **FEW),
    "probe_query": lambda n: ProbeQuery(n, density=1.0, **FEW),
    "a2ats": lambda n: KeyCodes(n, codes=512, far=0, **FEW),
    "shadowkv": lambda n: Landmarks(n, outliers=2, **FEW),
}
PRE = {"rekv", "probe_query", "a2ats", "shadowkv"}


def rotary() -> Rotary:
    return Rotary(10000.0 ** (-torch.arange(0, D, 2) / D))


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


class Row:
    """A layer that tokens are written to, and what a full cache of them would hold."""

    def __init__(self, name: str, layers: int = 1) -> None:
        turn = rotary() if name in PRE else None
        self.layers = [KVLayer(index, rotary=turn) for index in range(layers)]
        self.turn = turn

    def step(
        self, chooser, k: Tensor, v: Tensor, q: Tensor, valid: Any = None, tag: Any = None, layer: int = 0
    ) -> Tensor:
        """Write tokens (keys as queries meet them) and attend; without a chooser to all."""
        one = self.layers[layer]
        start, count = one.seen, k.shape[2]
        pos = torch.arange(start, start + count)
        meta = {} if tag is None else {"tag": tag}
        before = k if self.turn is None else self.turn.unrotate(k, pos)
        one.write(before, v, valid=valid, meta=meta)
        mask = None
        if valid is not None or one.padding is not None:
            seen = torch.arange(one.seen)
            pad = one.padding[:, None, None, None] if one.padding is not None else 0
            mask = (seen <= pos[:, None])[None, None] & (seen >= pad)
        query = Query(q, start, D**-0.5, mask=mask)
        views = one.views() if chooser is None else chooser.views(query, one, self.layers)
        return attend(query, views)


def run(
    chooser: Any, name: str, k: Tensor, v: Tensor, q: Tensor, prompt: int, valid: Any = None, tag: Any = None
) -> tuple[Tensor, KVLayer]:
    """Write a prompt at once and the rest token by token; return attention [B, Hq, n, D]."""
    row, width = Row(name), k.shape[2]
    found = []
    for first, last in pairwise([0, prompt, *range(prompt + 1, width + 1)]):
        new = (x[:, :, first:last] for x in (k, v, q))
        real = valid[:, first:last] if valid is not None and first == 0 else None
        found.append(row.step(chooser, *new, real, None if tag is None else tag[..., first:last]))
    return torch.cat(found, 2), row.layers[0]


def tokens(width: int, batch: int = B, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and queries."""
    k = noise(batch, H, width, D, seed=seed, scale=2.0)
    v = noise(batch, H, width, D, seed=seed + 1)
    q = noise(batch, H * G, width, D, seed=seed + 2, scale=2.0)
    return k, v, q

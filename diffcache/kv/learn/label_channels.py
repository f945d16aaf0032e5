"""Label channels of Double Sparsity, chosen from what a model asked and held."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.summary import news
from diffcache.kv.retrieve import Retriever
from diffcache.kv.view import View

By = Literal["qk", "q", "k"]


class LabelCalibration(Retriever):
    """Watch queries and keys while a model reads calibration prompts, and change nothing.

    Use it as the `retrieve` of a recipe, run prompts, one cache each, then ask for `channels`. A
    second prompt in the same cache adds its new keys only.

    Reference: Double Sparsity, arXiv 2408.07092: the channels that contribute most to
    the products of queries and keys, offline.
    """

    def __init__(self) -> None:
        self._q: dict[int, Tensor] = {}
        self._k: dict[int, Tensor] = {}

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Take note of the queries and of the keys that came with them, padding left out; read everything."""
        slots = news(layer, layer.held - query.count, stored=False)
        heads, index = slots.k.shape[1], layer.index
        there = slots.valid.expand(-1, heads, -1)[..., None].double()
        k = slots.k.double().abs() * there
        q = query.grouped(heads).double().abs().sum(2) * there
        for found, new in ((self._k, k), (self._q, q)):
            total = new.sum((0, 2))
            found[index] = found[index] + total if index in found else total
        return layer.views()

    def importance(self, by: By = "qk") -> Tensor:
        """Return how much each channel contributes, float64 [L, H, D].

        With `"qk"` the sum of abs(q_c k_c) over all pairs of a query and a key, up to a factor.

        Raises:
            ValueError: If nothing was seen, or `by` is unknown.
        """
        if by not in ("qk", "q", "k"):
            raise ValueError(f"by={by!r}: must be 'qk', 'q' or 'k'")
        if not self._k:
            raise ValueError("no queries were seen: run a model with this as its retriever first")
        one = torch.ones((), dtype=torch.float64)
        rows = []
        for layer in sorted(self._k):
            q = self._q[layer] if "q" in by else one
            rows.append(q * (self._k[layer] if "k" in by else one))
        return torch.stack(rows)

    def channels(self, count: int, by: By = "qk") -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the label channels of each head of each layer, rising.

        Args:
            count: Channels a head.
            by: Tensors whose magnitudes give the importance: `"qk"` for both, `"q"` or `"k"`.

        Raises:
            ValueError: If there are fewer channels, or nothing was seen.
        """
        found = self.importance(by)
        if not 1 <= count <= found.shape[2]:
            raise ValueError(f"count={count}: must be 1 to {found.shape[2]} channels")
        order = found.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values
        return tuple(tuple(tuple(head) for head in layer) for layer in order.tolist())

"""The masked oracle: a full cache in which the slots a recipe dropped are hidden.

A recipe that only keeps and drops must give what the full cache gives when every query sees
exactly the positions it saw in the compressed one. What it saw is written down while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.recipe import Recipe
from diffcache.kv.store import KVStore

Log = dict[tuple[int, int], Tensor]  # (layer, first position of the queries) -> pos [B, H, S]
NAME = "oracle"


@contextmanager
def logged() -> Iterator[Log]:
    """Write down which positions queries of every layer found in a store."""
    log: Log = {}
    attend = KVStore.attend

    def spy(self: KVStore, index: int, query: Query, valid: Tensor | None = None) -> Tensor:
        log[index, query.start] = self.layers[index].read().pos.clone()
        return attend(self, index, query, valid)

    KVStore.attend = spy  # type: ignore[method-assign]
    try:
        yield log
    finally:
        KVStore.attend = attend  # type: ignore[method-assign]


@contextmanager
def masked(model: Any, log: Log, owned: list[int]) -> Iterator[None]:
    """Have a model with a full cache see only what the log names."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        batch, heads, width, _ = key.shape
        count, groups = query.shape[2], query.shape[1] // heads
        start = width - count
        order = torch.arange(width)
        seen = order[None] <= torch.arange(start, width)[:, None]
        if mask is not None:
            seen = mask[..., :width]
        seen = seen.expand(batch, heads, count, width).clone()
        if module.layer_idx in owned:
            pos = log[owned.index(module.layer_idx), start].expand(batch, heads, -1).long()
            kept = torch.zeros(batch, heads, width + 1, dtype=torch.bool)
            kept.scatter_(2, pos.where(pos >= 0, width), True)
            seen &= kept[:, :, None, :width]
        seen = seen | ~seen.any(-1, keepdim=True)
        k, v = (x.repeat_interleave(groups, 1) for x in (key, value))
        out = functional.scaled_dot_product_attention(
            query, k, v, attn_mask=seen.repeat_interleave(groups, 1), scale=kwargs["scaling"]
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def run(model: Any, recipe: Recipe, inputs: Any, **settings: Any) -> tuple[Any, KVCache, Log]:
    """Generate with a recipe; return the output, the cache, and what queries found."""
    cache = cache_for(model, recipe, mode="native")
    with logged() as log:
        out = model.generate(**inputs, past_key_values=cache, **settings)
    detach(model)
    return out, cache, log


def expected(model: Any, cache: KVCache, log: Log, inputs: Any, **settings: Any) -> Any:
    """Generate with a full cache in which the same slots are hidden."""
    with masked(model, log, cache.owned):
        full = DynamicCache(config=model.config)
        return model.generate(**inputs, past_key_values=full, **settings)

"""The masked oracle: a full cache in which the slots a recipe dropped are hidden.

A recipe that only keeps and drops must give what the full cache gives when every query sees
exactly the positions it saw in the compressed one. What it saw is written down while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from diffcache.eval.kv.contexts import attending
from diffcache.foreign import with_cache
from diffcache.kv.attend import Query
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.model import CacheSetup
from diffcache.kv.recipe import Recipe
from diffcache.kv.store import KVStore

Log = dict[tuple[int, int], Tensor]  # (layer, first position of the queries) -> pos [B, H, S]


class Full(DynamicCache):  # type: ignore[misc]
    """A full cache that says which layer was written to last; owned layers hold all tokens, whatever their window."""

    last = -1

    def __init__(self, config: Any, owned: Sequence[int] = ()) -> None:
        super().__init__(config=config)
        for index in owned:
            if self.layers[index].is_sliding:
                self.layers[index] = DynamicLayer()

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        """Take keys and values, as transformers gives them."""
        self.last = layer_idx
        return super().update(k, v, layer_idx, *rest, **more)


@contextmanager
def logged() -> Iterator[Log]:
    """Write down which positions queries of every layer found in a store."""
    log: Log = {}
    attend = KVStore.attend

    def spy(self: KVStore, index: int, query: Query, *given: Any, **more: Any) -> Tensor:
        log[index, query.start] = self.layers[index].read().pos.clone()
        return attend(self, index, query, *given, **more)

    KVStore.attend = spy  # type: ignore[method-assign]
    try:
        yield log
    finally:
        KVStore.attend = attend  # type: ignore[method-assign]


@contextmanager
def masked(model: Any, log: Log, setup: CacheSetup, full: Full) -> Iterator[None]:
    """Have a model with a full cache see only what the log names."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        seen = _seen(module, query, key, attention_mask, kwargs, setup.eager)
        if full.last in setup.owned:
            number, start = setup.owned.index(full.last), key.shape[2] - query.shape[2]
            seen = seen & _logged(log[number, start], key)[:, :, None]
            window = setup.windows[number]
            if window is not None:  # the stock cache holds no more
                seen = seen & (torch.arange(key.shape[2]) > start - window)
        return _softmax(query, key, value, seen, kwargs), None

    with attending(model, "oracle", attention):
        yield


def run(model: Any, recipe: Recipe, inputs: Any, **settings: Any) -> tuple[Any, KVCache, Log]:
    """Generate with a recipe; return the output, the cache, and what queries found."""
    cache = cache_for(model, recipe, mode="native")
    try:
        with logged() as log:
            out = model.generate(**inputs, **with_cache(model, cache), **settings)
    finally:
        detach(model)
    return out, cache, log


def expected(model: Any, cache: KVCache, log: Log, inputs: Any, **settings: Any) -> Any:
    """Generate with a full cache in which the same slots are hidden."""
    full = Full(model.config, cache.owned)
    with masked(model, log, cache.setup, full):
        return model.generate(**inputs, **with_cache(model, full), **settings)


def _seen(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any], eager: bool) -> Tensor:
    """Return which keys the model lets each query see, bool [B, H, n, T]."""
    width, count = key.shape[2], query.shape[2]
    if mask is not None:
        seen = mask[..., :width]
    else:
        given = kwargs.get("is_causal")
        causal = (eager or getattr(module, "is_causal", True)) if given is None else given
        at = torch.arange(width - count, width)[:, None]
        seen = torch.arange(width)[None] <= (at if causal else width)
    return seen.expand(len(key), key.shape[1], count, width)


def _logged(pos: Tensor, key: Tensor) -> Tensor:
    """Return which positions are in a log, bool [B, H, T]."""
    batch, heads, width, _ = key.shape
    pos = pos.expand(batch, heads, -1).long()
    kept = torch.zeros(batch, heads, width + 1, dtype=torch.bool)
    return kept.scatter_(2, pos.where(pos >= 0, width), True)[..., :width]


def _softmax(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return attention written out, [B, n, Hq, Dv]."""
    groups = query.shape[1] // key.shape[1]
    k, v, seen = (x.repeat_interleave(groups, 1) for x in (key, value, seen))
    given = kwargs.get("scaling")
    logits = query @ k.transpose(2, 3) * (query.shape[3] ** -0.5 if given is None else given)
    cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    seen = seen | ~seen.any(-1, keepdim=True)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    out: Tensor = weights @ v
    return out.transpose(1, 2).contiguous()

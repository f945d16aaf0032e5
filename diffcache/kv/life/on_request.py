"""Compress a cache when it is asked to, by what probes attend to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from diffcache.kv.score.most_attention import PROBE, Asked, MaxAttention
from diffcache.kv.store import KVStore
from diffcache.kv.trigger import Event, Trigger

T = TypeVar("T")


class Forkable(Protocol):
    """A cache whose content is a store, as that of `diffcache.kv.hf.cache_for`."""

    store: KVStore

    def fork(self: T) -> T:
        """Return a cache with the same content; going on with either leaves the other as it is."""


C = TypeVar("C", bound=Forkable)


@dataclass(frozen=True)
class OnRequest(Trigger):
    """Compress only when `compress` is called."""

    by_itself = False

    def due(self, event: Event) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class AfterProbe(Trigger):
    """Compress only when asked to; a first prompt that was not is not gone on from."""

    by_itself = False

    def due(self, event: Event) -> bool:
        """Return False, or raise ValueError if a prompt has ended that no probe was run on."""
        ended = event.fresh and (event.coming == 1 or event.speculative)
        if ended and event.since == event.seen:
            raise ValueError(
                "this recipe drops nothing by itself: run the prompt, ask with "
                "diffcache.kv.life.on_request.compress_by_probe(cache, lambda fork: model(ids, "
                "past_key_values=fork)), and then generate; recipes such as snapkv compress by "
                "themselves"
            )
        return False


def compress_by_probe(cache: C, *asks: Callable[[C], object]) -> None:
    """Compress a cache by how much probes attend to each of its slots.

    Each probe is a text that is run after what the cache holds, on a fork that is then forgotten:
    the text typical of an episode (EpiCache), or the prompt once more (KVzip). A slot is worth the
    most attention that any query of any probe gave it.

    Args:
        cache: Cache with a recipe that scores by `diffcache.kv.score.most_attention.Asked`.
        asks: Functions, each of which runs the model on its text with the fork it is given.

    Raises:
        ValueError: If the recipe scores by something else, or no probe was run.

    Reference: EpiCache, arXiv 2509.17396; KVzip, arXiv 2505.23416.
    """
    store = cache.store
    if store.recipe.score != Asked() or not asks:
        raise ValueError(
            f"score={store.recipe.score!r}, {len(asks)} probes: needs a recipe that scores by "
            "Asked(), such as epicache or kvzip, and at least one probe"
        )
    found: list[Tensor] = []
    for ask in asks:
        each = _asked(cache, ask)
        found = [torch.maximum(*pair) for pair in zip(found, each, strict=True)] if found else each
    layers = store.layers[store.recipe.skip :]
    try:
        for layer, value in zip(layers, found, strict=True):
            layer.stats = {PROBE: value}
        store.compress()
    finally:
        for layer in layers:
            layer.stats = {}


def _asked(cache: C, ask: Callable[[C], object]) -> list[Tensor]:
    """Return the most attention of a probe to each slot, [B, H, S] of each layer."""
    store, fork = cache.store, cache.fork()
    fork.store.recipe = replace(store.recipe, score=MaxAttention(), trigger=OnRequest(), codec=None)
    fork.store.speculative = False
    ask(fork)
    layers = fork.store.layers[store.recipe.skip :]
    if any(PROBE not in layer.stats for layer in layers):
        raise ValueError("a probe ran without the fork it was given: pass it to the model")
    return [
        asked.stats[PROBE][..., : layer.held].clone()
        for layer, asked in zip(store.layers[store.recipe.skip :], layers, strict=True)
    ]


def prefill_by_blocks(
    cache: C, forward: Callable[[Tensor, C], object], ids: Tensor, probe: Tensor, block: int
) -> None:
    """Read a conversation block by block, and compress after each by a probe.

    The cache so never holds more than its budget and a block.

    Args:
        cache: Cache with a recipe that scores by probes.
        forward: Function that runs the model on ids [B, n] with the cache it is given.
        ids: The conversation, int64 [B, T].
        probe: The text typical of an episode, int64 [B, n].
        block: Tokens of a block.

    Raises:
        ValueError: If `block` is less than 1.

    Reference: EpiCache, arXiv 2509.17396.
    """
    if block < 1:
        raise ValueError(f"block={block}: must be at least 1 token")
    for part in ids.split(block, 1):
        forward(part, cache)
        compress_by_probe(cache, partial(forward, probe))

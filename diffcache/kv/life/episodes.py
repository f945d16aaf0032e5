"""Episodes of a conversation: a cache for each, compressed by what is typical of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.score.probe import PROBE, Asked, MaxAttention
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
        """Return False.

        Raises:
            ValueError: If a prompt has ended that no probe was run on.
        """
        ended = event.fresh and (event.coming == 1 or event.speculative)
        if ended and event.since == event.seen:
            raise ValueError(
                "this recipe drops nothing by itself: run the prompt, ask with "
                "diffcache.kv.life.episodes.compress_by_probe(cache, lambda fork: model(ids, "
                "past_key_values=fork)), and then generate; recipes such as snapkv compress by "
                "themselves"
            )
        return False


@dataclass(frozen=True)
class Episodes:
    """Groups of the segments of a conversation.

    Attributes:
        labels: Number of the episode that each segment belongs to, int64 [K].
        centroids: Mean embedding of each episode, [E, d].
        medoids: The segment that is most like the mean of its episode, int64 [E].
    """

    labels: Tensor
    centroids: Tensor
    medoids: Tensor


def find_episodes(
    embeddings: Tensor, count: int, *, seed: int = 0, iterations: int = 100
) -> Episodes:
    """Group segments by their embeddings: k-means, started by k-means++.

    Args:
        embeddings: Embedding of each segment of a few utterances, in order, [K, d].
        count: Number of episodes, at most K.
        seed: Seed of the first centroids.
        iterations: Rounds of k-means at most.

    Raises:
        ValueError: If a number is out of range.

    Reference: EpiCache, arXiv 2509.17396.
    """
    if embeddings.dim() != 2 or not 1 <= count <= len(embeddings) or iterations < 1:
        raise ValueError(
            f"embeddings={list(embeddings.shape)}, count={count}, iterations={iterations}: must be "
            "[K, d], 1 to K episodes and at least 1 round"
        )
    points = embeddings.double().cpu()
    centers = _start(points, count, torch.Generator().manual_seed(seed))
    labels = torch.cdist(points, centers).argmin(1)
    for _ in range(iterations):
        centers = _means(points, labels, centers)
        moved = torch.cdist(points, centers).argmin(1)
        if torch.equal(moved, labels):
            break
        labels = moved
    centers = _means(points, labels, centers)
    alike = functional.cosine_similarity(points[:, None], centers[None], dim=-1)
    mine = labels[:, None] == torch.arange(count)
    medoids = alike.masked_fill(~mine, float("-inf")).argmax(0)
    return Episodes(labels, centers.to(embeddings.dtype), medoids)


def _start(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return segments that are far apart, each drawn by its squared distance to those before."""
    first = torch.randint(len(points), (1,), generator=generator)
    chosen = [int(first)]
    far = (points - points[chosen[0]]).square().sum(1)
    for _ in range(count - 1):
        weights = far.clone()
        weights[chosen] = 0
        if not bool(weights.sum() > 0):  # all others are copies: take any
            weights = torch.ones_like(far)
            weights[chosen] = 0
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
        far = far.minimum((points - points[chosen[-1]]).square().sum(1))
    return points[chosen]


def _means(points: Tensor, labels: Tensor, before: Tensor) -> Tensor:
    """Return the mean of each episode; one without segments stays where it was."""
    mine = functional.one_hot(labels, len(before)).to(points.dtype)
    count = mine.sum(0)[:, None]
    return ((mine.T @ points) / count.clamp_min(1)).where(count > 0, before)


class Library(Generic[T]):
    """A cache for each episode, found by the embedding of a question.

    Args:
        centroids: Mean embedding of each episode, [E, d].

    Reference: EpiCache, arXiv 2509.17396.
    """

    def __init__(self, centroids: Tensor) -> None:
        if centroids.dim() != 2 or not len(centroids):
            raise ValueError(f"centroids={list(centroids.shape)}: must be [E, d], at least one")
        self.centroids = centroids
        self._caches: dict[int, T] = {}

    def __len__(self) -> int:
        """Return how many episodes have a cache."""
        return len(self._caches)

    def put(self, episode: int, cache: T) -> None:
        """Keep the cache of an episode.

        Raises:
            ValueError: If there is no such episode.
        """
        if not 0 <= episode < len(self.centroids):
            raise ValueError(f"episode={episode}: must be 0 to {len(self.centroids) - 1}")
        self._caches[episode] = cache

    def route(self, question: Tensor) -> int:
        """Return the episode, among those with a cache, that a question [d] is most like.

        Raises:
            ValueError: If no episode has a cache, or the embedding does not fit.
        """
        if not self._caches:
            raise ValueError("no episode has a cache yet: put one in first")
        if question.shape != self.centroids.shape[1:]:
            raise ValueError(
                f"question={list(question.shape)}: must be [{self.centroids.shape[1]}], made by "
                "the encoder that made the centroids"
            )
        known = sorted(self._caches)
        alike = functional.cosine_similarity(question[None], self.centroids[known], dim=-1)
        return known[int(alike.argmax())]

    def find(self, question: Tensor) -> T:
        """Return the cache for a question [d]; fork it if it is to answer others too."""
        return self._caches[self.route(question)]


def compress_by_probe(cache: C, *asks: Callable[[C], object]) -> None:
    """Compress a cache by how much probes attend to each of its slots.

    Each probe is a text that is run after what the cache holds, on a fork that is then forgotten:
    the text typical of an episode (EpiCache), or the prompt once more (KVzip). A slot is worth the
    most attention that any query of any probe gave it.

    Args:
        cache: Cache with a recipe that scores by `diffcache.kv.score.probe.Asked`.
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

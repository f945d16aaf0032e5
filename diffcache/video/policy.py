"""Base class of cache policies for causal video, and the full history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

from diffcache.anchor import Attached, Loop, claim, owner_of, release
from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.recipe import Recipe
from diffcache.kv.store import KVStore
from diffcache.method import Citation, Name, check_int
from diffcache.ranges import Settings
from diffcache.registry import check_settings, find, read_word, unknown

Prompts = Sequence[tuple[int, Tensor]]  # first token and mean, `[B, E]`, the present one last


class VideoPolicy(Settings, ABC):
    """Choice of the frames that a stream holds, and how they are read; a frozen dataclass.

    A policy decides at the start of a chunk, before anything of it is written, or in its first
    step. Frames are latent frames. The chunk that is made comes on top of what a policy holds.

    Attributes:
        name: Name in the catalogue; by default that of the registry.
        bibtex: Entry to cite it by; by default that of `citations.bib`.
        sinks: First frames, held for ever, and through a flush of the cache.
        by_query: Whether `first_step` drops anything, which cannot be taken back.
        by_head: Whether what becomes of a head is the same without the others, so that processes
            can share a stream by its heads.
    """

    name: ClassVar[str] = cast(str, Name())
    bibtex: ClassVar[str] = cast(str, Citation())
    sinks: int = 0
    by_query: ClassVar[bool] = False
    by_head: ClassVar[bool] = False

    @property
    def most_recached(self) -> int | None:
        """Most frames that a re-cache may make anew; None for any number."""
        return None

    @abstractmethod
    def recipe(self, unit: int) -> Recipe:
        """Return the recipe of the key-value store, with keys held before rotation.

        Args:
            unit: Tokens of a frame.
        """

    def begin(self, store: KVStore, unit: int, prompts: Prompts = ()) -> None:
        """Change held frames at the start of a chunk, beside the recipe; by default not.

        Args:
            store: Keys and values, with whole frames in it.
            unit: Tokens of a frame.
            prompts: First token, and mean over the text, of each prompt that frames were made under
                and of the present one.
        """

    def first_step(self, store: KVStore, index: int, query: Query) -> None:
        """Drop slots of a layer in the first, noisiest step of a chunk; by default none.

        Args:
            store: Keys and values, the chunk's own of this layer among them.
            index: Number of the layer.
            query: Queries of the chunk, rotated.
        """


def check_pool(pool: int, sinks: int, count: int) -> None:
    """Raise ValueError unless a pool has room for its sinks, and the frames that are read of it."""
    check_int("pool", pool, max(sinks, 1))
    if count > pool:
        raise ValueError(f"count={count}: must be at most pool={pool}")


@dataclass(frozen=True)
class FullHistory(VideoPolicy):
    """Hold every frame, under its own position.

    Memory and the time of a chunk grow with the film.

    Reference: Self-Forcing, arXiv 2506.08009, with the whole history.
    """

    by_head: ClassVar[bool] = True

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops nothing."""
        return Recipe(self.name, space="pre")


def make_policy(policy: str | VideoPolicy, **settings: Any) -> VideoPolicy:
    """Return a policy from its name and settings; a policy is returned as it is.

    Args:
        policy: A policy, or its name, after which settings may follow: `window:window=12,sinks=3`.
        **settings: Settings of a policy given by name.

    Raises:
        UnknownMethodError: If the registry has no such name.
        ValueError: If a setting is unknown, given twice or out of its range, or `policy` is neither
            a name nor a policy.
    """
    if isinstance(policy, VideoPolicy) and not settings:
        return policy
    if not isinstance(policy, str):
        raise ValueError(
            f"policy={policy!r}: must be a policy of diffcache.video, such as Window(6, sinks=3), "
            "or a name and its settings, such as 'window:window=6,sinks=3'"
        )
    name, own = read_word(policy)
    row = find(name, "video")
    if row is None:
        raise unknown(name, "video")
    twice = sorted(own.keys() & settings.keys())
    if twice:
        raise ValueError(f"policy {policy!r}: {twice[0]} is given twice")
    settings = own | settings
    check_settings(row.load(), settings)
    if isinstance(settings.get("policy"), str):  # of `quantized`
        settings["policy"] = make_policy(settings["policy"])
    made: VideoPolicy = row.load()(**settings)
    return made


class Films(Loop):
    """An object that films chunk by chunk, each stream under a policy.

    Attributes:
        policy: Policy of the streams that name none.
    """

    policy: VideoPolicy

    @abstractmethod
    def check_policy(self, policy: VideoPolicy) -> None:
        """Raise ValueError unless streams can be held under a policy."""


class PolicyOf(Attached):
    """A policy that `diffcache.wrap` put on a video; streams that are open keep theirs.

    Args:
        films: Object whose new streams take the policy.
        policy: The policy.

    Raises:
        ValueError: If it does not go with the transformer.
    """

    def __init__(self, films: Films, policy: VideoPolicy) -> None:
        films.check_policy(policy)
        self.method, self.films, self.before = policy, films, films.policy
        films.policy = policy
        claim(films, self)

    def check_idle(self) -> None:
        """Do nothing: streams that are open keep their policy."""

    def reset(self) -> None:
        """Do nothing: streams hold frames, and are reset one by one."""

    def detach(self) -> None:
        """Give the object its own policy back."""
        if owner_of(self.films) is self:
            self.films.policy = self.before
            release(self.films)


def frames_of(layer: KVLayer, unit: int) -> Tensor:
    """Return the slots of all frames, the same ones in all rows, that a layer holds, oldest first, int64 [F, unit]."""
    return layer.meta()["pos"][0, 0].argsort().view(-1, unit)

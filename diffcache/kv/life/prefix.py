"""Prefix tree: keys and values of the start of one text serve all texts that start so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

from diffcache.method import check_int

T = TypeVar("T")


def chain(ids: Sequence[int], model: str, chunk: int = 256) -> list[bytes]:
    """Return a hash of each full chunk of a text and of all that stands before it.

    Whatever changes in a text, or in the name of the model, changes the hashes of its chunk and
    of all later ones.

    Args:
        ids: Tokens, each 0 to 2 ** 63 - 1.
        model: Name of the model that computes, and of its weights.
        chunk: Tokens of a chunk.

    Raises:
        ValueError: If `chunk` is no whole number of at least 1.
    """
    check_int("chunk", chunk, 1)
    head = f"{chunk}:{model}".encode()
    before = blake2b(head, digest_size=32).digest()
    found = []
    for start in range(0, len(ids) // chunk * chunk, chunk):
        part = b"".join(int(token).to_bytes(8, "little") for token in ids[start : start + chunk])
        before = blake2b(before + part, digest_size=32).digest()
        found.append(before)
    return found


@dataclass
class _Node(Generic[T]):
    parent: bytes | None
    value: T
    nbytes: int
    used: float
    pinned: float = float("-inf")  # until then
    children: set[bytes] = field(default_factory=set)


class PrefixTree(Generic[T]):
    """Chunks by their chained hash, the least recently used forgotten first.

    A chunk is forgotten only after those that follow it: nothing is held that cannot be reached.

    Reference: pins with a time to live are those of Continuum, arXiv 2511.02230.

    Args:
        model: Name of the model that computes, and of its weights.
        budget_bytes: Most bytes that are held.
        chunk: Tokens of a chunk.
        clock: Function that returns the time in seconds.

    Raises:
        ValueError: If a number is not whole or out of its range.
    """

    def __init__(
        self, model: str, budget_bytes: int, chunk: int = 256, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_int("budget_bytes", budget_bytes, 0)
        chain((), model, chunk)
        self.model, self.budget_bytes, self.chunk = model, budget_bytes, chunk
        self.nbytes = 0
        self._clock = clock
        self._tick = 0.0
        self._nodes: dict[bytes, _Node[T]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, ids: Sequence[int]) -> list[T]:
        """Return what is held for the start of a text, chunk by chunk, and mark it as used."""
        found = []
        for key in chain(ids, self.model, self.chunk):
            if key not in self._nodes:
                break
            self._nodes[key].used = self._now()
            found.append(self._nodes[key].value)
        return found

    def insert(self, ids: Sequence[int], values: Sequence[T], nbytes: Sequence[int]) -> int:
        """Hold the values of the full chunks of a text; those that are held already stay.

        Args:
            ids: The text from its start.
            values: Value of each full chunk.
            nbytes: Bytes of each value.

        Returns:
            Number of chunks of the text that are held afterwards.

        Raises:
            ValueError: If there is not one value and size a full chunk.
        """
        keys = chain(ids, self.model, self.chunk)
        if not len(keys) == len(values) == len(nbytes):
            raise ValueError(
                f"{len(ids)} tokens are {len(keys)} full chunks of {self.chunk}; got {len(values)} "
                f"values and {len(nbytes)} sizes"
            )
        parent: bytes | None = None
        ours: set[bytes] = set()
        for key, value, size in zip(keys, values, nbytes, strict=True):
            if key not in self._nodes:
                if not self._make_room(size, ours):
                    break
                self._nodes[key] = _Node(parent, value, size, self._now())
                self.nbytes += size
                if parent is not None:
                    self._nodes[parent].children.add(key)
            self._nodes[key].used = self._now()
            ours.add(key)
            parent = key
        return len(ours)

    def pin(self, ids: Sequence[int], seconds: float) -> int:
        """Keep the start of a text for some time, whatever else comes; return its chunks held.

        Args:
            ids: The text.
            seconds: Time to pin it, from now; 0 takes a pin away.

        Raises:
            ValueError: If `seconds` is negative.
        """
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}: must be at least 0")
        count = 0
        for key in chain(ids, self.model, self.chunk):
            if key not in self._nodes:
                break
            self._nodes[key].pinned = self._clock() + seconds
            count += 1
        return count

    def _now(self) -> float:
        self._tick += 1
        return self._tick

    def _make_room(self, size: int, keep: set[bytes]) -> bool:
        """Forget leaves until `size` bytes fit; False if they cannot."""
        now = self._clock()
        while self.nbytes + size > self.budget_bytes:
            leaves = [
                (node.used, key)
                for key, node in self._nodes.items()
                if not node.children and node.pinned <= now and key not in keep
            ]
            if not leaves:
                return False
            self._forget(min(leaves)[1])
        return True

    def _forget(self, key: bytes) -> None:
        node = self._nodes.pop(key)
        self.nbytes -= node.nbytes
        if node.parent is not None:
            self._nodes[node.parent].children.discard(key)


def time_to_live(durations: Sequence[float], reload_seconds: float, holding: float = 1.0) -> float:
    """Return for how long it pays to pin what a tool call will need again, in seconds.

    That is where the chance that the call has returned, times what reloading would cost, exceeds
    the cost of holding by most; 0 where holding never pays.

    Reference: Continuum, arXiv 2511.02230. Departure: the queueing delay that eviction
    brings is for the caller to add to `reload_seconds`.

    Args:
        durations: Durations of past calls of the tool, in seconds.
        reload_seconds: Time to compute or load again the chunks that would have been dropped.
        holding: Cost of a second of holding, in seconds of delay of others.

    Raises:
        ValueError: If a number is negative.
    """
    if min([*durations, reload_seconds, holding]) < 0:
        raise ValueError(
            f"durations={list(durations)}, reload_seconds={reload_seconds}, holding={holding}: must be at least 0"
        )
    best, gain = 0.0, 0.0
    for rank, seconds in enumerate(sorted(durations), start=1):
        worth = rank / len(durations) * reload_seconds - holding * seconds
        if worth > gain:
            best, gain = float(seconds), worth
    return best

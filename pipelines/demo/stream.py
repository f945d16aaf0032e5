"""Film in a thread of its own: orders go in at the start of a chunk, chunks come out in order.

Nothing here knows a page or a transformer. A page takes chunks from `Stream.chunks`; they are made by a `Film`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from statistics import quantiles
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diffcache.pipelines.demo.source import Reader

AHEAD = 2  # chunks that may wait to be shown
PATIENCE = 60.0  # seconds that a chunk waits to be taken before the film ends
_TICK = 0.1  # seconds between two looks at whether to stop
_LAST = 20  # chunks whose latency is summarized


class Film(Protocol):
    """Maker of frames; every method is called by one thread."""

    def next(self, seen: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the frames of the next chunk, uint8 `[F, H, W, 3]`.

        `seen` are the pictures that it is made from, of the same form; None for a film from text.
        """

    def apply(self, order: Mapping[str, Any]) -> None:
        """Carry out the viewer's orders before the next chunk.

        Raises:
            ValueError: If one cannot be carried out; the film goes on as it was.
        """

    def readings(self) -> dict[str, float]:
        """Return read-outs for a viewer, such as bytes held by role."""

    def news(self) -> str:
        """Return the film's news since the last call, such as that it was restored."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Frames that belong together.

    Attributes:
        number: Number of the chunk, from 0.
        frames: uint8 `[F, H, W, 3]`.
        applied: Orders that took effect with it.
        refused: Reason why an order was not carried out; empty where all were.
        news: News of the film for the viewer, beside orders; empty for none.
        readings: Read-outs after it; `seconds` that it took, and `p50` and `p95` of the latest chunks' seconds.
    """

    number: int
    frames: NDArray[np.uint8]
    applied: Mapping[str, Any]
    refused: str
    news: str
    readings: dict[str, float]


class Mailbox:
    """Orders that wait for the start of a chunk; among several of one kind the latest counts."""

    def __init__(self) -> None:
        self._orders: dict[str, Any] = {}
        self._lock = threading.Lock()

    def put(self, **orders: Any) -> None:
        """Leave orders."""
        with self._lock:
            self._orders |= orders

    def take(self) -> dict[str, Any]:
        """Return the orders and forget them."""
        with self._lock:
            orders, self._orders = self._orders, {}
            return orders


@dataclass(eq=False)
class Stream:
    """A film that is being made, in a thread of its own.

    No frame is dropped: the thread waits while nobody takes the chunks that it made. It ends after a minute of that,
    since a page that was closed does not always say so.

    Args:
        make: Returns the film; it is called in the thread, so that loading does not block a page.
        limit: Chunks after which it ends; None for none.
        reader: Pictures that the film is made from, with which it ends; None for a film from text.

    Attributes:
        orders: Changes that are asked of the film.
    """

    make: Callable[[], Film]
    limit: int | None = None
    reader: Reader | None = None
    orders: Mailbox = field(default_factory=Mailbox)

    def __post_init__(self) -> None:
        self._made: Queue[Chunk | BaseException | None] = Queue(AHEAD)
        self._stop, self._running = threading.Event(), threading.Event()
        self._running.set()
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._thread = threading.Thread(target=self._work, name="diffcache-film", daemon=True)

    def start(self) -> Stream:
        """Begin to film."""
        self._thread.start()
        return self

    def pause(self) -> None:
        """Stop filming after the chunk that is made, until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """Go on filming."""
        self._running.set()

    def close(self, timeout: float | None = None) -> None:
        """End the film and wait for its thread.

        `timeout` is the most seconds to wait; None waits for the chunk that is being made.
        """
        self._stop.set()
        self._running.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        with suppress(Empty):
            while True:  # frames, or an error that holds the film
                self._made.get_nowait()

    def __enter__(self) -> Stream:
        return self.start()

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def chunks(self) -> Iterator[Chunk | None]:
        """Yield chunks as they come, and None after each while without one, until `close`.

        Raises:
            Exception: Error of the film; the frames before come first.
        """
        while not self._stop.is_set():
            try:
                made = self._made.get(timeout=_TICK)
            except Empty:
                yield None
                continue
            if made is None:
                return
            if isinstance(made, BaseException):
                raise made
            yield made

    @property
    def over(self) -> bool:
        """Return True once nothing more will be made."""
        began = self._thread.ident is not None
        return self._stop.is_set() or (began and not self._thread.is_alive())

    @property
    def waiting(self) -> int:
        """Number of chunks that are made and not taken."""
        return self._made.qsize()

    # the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            film, number = self.make(), 0  # the thread alone holds the film, and drops it
            while self.limit is None or number < self.limit:
                while not self._running.wait(_TICK) and not self._stop.is_set():
                    pass
                seen = self.reader.take(self._stop.is_set) if self.reader else None
                if self.reader is not None and seen is None:
                    break
                if self._stop.is_set() or not self._hand_on(self._film(film, number, seen)):
                    return
                number += 1
            self._hand_on(None)
        except BaseException as error:  # handed to whoever takes the chunks
            self._hand_on(error)

    def _film(self, film: Film, number: int, seen: NDArray[np.uint8] | None) -> Chunk:
        """Make one chunk with the orders that wait; `seen` are the pictures it is made from, None for none."""
        applied, refused = self.orders.take(), ""
        if applied:
            try:
                film.apply(applied)
            except ValueError as error:
                applied, refused = {}, str(error)
        started = time.perf_counter()
        frames = film.next() if seen is None else film.next(seen)
        self._seconds.append(time.perf_counter() - started)
        known = list(self._seconds)
        cuts = quantiles(known, n=20, method="inclusive") if len(known) > 1 else known * 19
        readings = film.readings() | {"seconds": known[-1], "p50": cuts[9], "p95": cuts[18]}
        if self.reader is not None:
            readings["dropped"] = float(self.reader.dropped)
            readings["behind"] = time.monotonic() - self.reader.arrived
        return Chunk(number, frames, applied, refused, film.news(), readings)

    def _hand_on(self, made: Chunk | BaseException | None) -> bool:
        """Wait for room and hand on a chunk, an error or the end; return whether anybody still wants it."""
        latest = time.monotonic() + PATIENCE
        while not self._stop.is_set() and time.monotonic() < latest:
            try:
                self._made.put(made, timeout=_TICK)
            except Full:
                continue
            return True
        self._stop.set()
        return False

"""Film in other processes: replicas under Ray Serve, each with a model and films of viewers.

>>> with replicas(open_model, count=2) as make:  # doctest: +SKIP
...     film = make(asked)  # a `Film`, made where the fewest are
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffcache.method import check_int
from diffcache.pipelines.demo.stream import Film

Make = Callable[[Any], Film]
IDLE = 600.0  # seconds after which a film that nobody asks for is dropped
BUSY = 100  # films whose next chunk may be asked for at the same time
STORE_BYTES = 100_000_000  # of Ray's object store, which chunks pass through


class Replica:
    """The films of one process.

    Args:
        opened: Loads the model and returns what makes a film of what a viewer asked for.
    """

    def __init__(self, opened: Callable[[], Make]) -> None:
        self._make = opened()
        self._films: dict[str, Film] = {}
        self._asked_at: dict[str, float] = {}

    async def call(self, name: str, verb: str, *given: Any) -> tuple[str, Any]:
        """Do something with a film, in a thread of its own.

        Args:
            name: Name of the film.
            verb: `begin`, `next`, `apply` or `end`.
            given: Arguments that go with the verb.

        Returns:
            `done` and the result, `refused` and why, or `lost` where there is no such film.
        """
        return await asyncio.to_thread(self._call, name, verb, *given)

    def _call(self, name: str, verb: str, *given: Any) -> tuple[str, Any]:
        try:
            self._asked_at[name] = time.monotonic()
            if verb == "begin":
                self._drop_idle()
                self._films[name] = self._make(*given)
                return "done", None
            if verb == "end":
                self._drop(name)
                return "done", None
            film = self._films.get(name)
            if film is None:
                self._drop(name)
                return "lost", None
            if verb == "apply":
                film.apply(*given)
                return "done", None
            return "done", (film.next(), film.readings())
        except ValueError as error:  # handed over as text: Ray would add a traceback
            return "refused", str(error)
        except Exception as error:
            last = str(error).strip().splitlines()[-1:] or [""]
            return "refused", f"the replica failed: {type(error).__name__}: {last[0]}"

    def _drop(self, name: str) -> None:
        self._films.pop(name, None)
        self._asked_at.pop(name, None)

    def _drop_idle(self) -> None:
        before = time.monotonic() - IDLE
        for name in [name for name, at in list(self._asked_at.items()) if at < before]:
            self._drop(name)


class RemoteFilm:
    """A film of a replica; it ends there when nobody refers to it here any more.

    Args:
        handle: Handle of the replica.
    """

    def __init__(self, handle: Any) -> None:
        self._handle, self._name = handle, uuid.uuid4().hex
        self._readings: dict[str, float] = {}
        self._ends = weakref.finalize(self, _end, handle, self._name)

    def begin(self, asked: Any) -> None:
        """Make the film in its replica.

        Args:
            asked: Settings that the viewer asked for.

        Raises:
            ValueError: If the replica cannot make such a film, or has ended.
        """
        self._ask("begin", asked)

    def next(self) -> NDArray[np.uint8]:
        """Return the frames of the next chunk, `[F, H, W, 3]`.

        Raises:
            ValueError: If the replica refuses, or has ended.
        """
        frames, self._readings = self._ask("next")
        made: NDArray[np.uint8] = frames
        return made

    def apply(self, order: Mapping[str, Any]) -> None:
        """Carry out what was ordered, before the next chunk.

        Raises:
            ValueError: If it cannot be done; the film goes on as it was.
        """
        self._ask("apply", dict(order))

    def readings(self) -> dict[str, float]:
        """Return the read-outs after the last chunk."""
        return self._readings

    def close(self) -> None:
        """End the film in its replica."""
        self._ends()

    def forget(self) -> None:
        """Leave the film alone: its replica ends."""
        self._ends.detach()

    def _ask(self, verb: str, *given: Any) -> Any:
        from ray.exceptions import RayActorError

        try:
            answer, value = self._handle.call.remote(self._name, verb, *given).result()
        except RayActorError:
            answer, value = "lost", None
        if answer == "refused":
            raise ValueError(value)
        if answer == "lost":
            raise ValueError("the replica that made this film has ended; start the film again")
        return value


def _end(handle: Any, name: str) -> None:
    with suppress(Exception):  # a replica that is gone has no films
        handle.call.remote(name, "end")


@contextmanager
def replicas(
    opened: Callable[[], Make], *, count: int = 2, cpus: float = 1.0, gpus: float = 0.0
) -> Iterator[Make]:
    """Start replicas under Ray Serve and give what makes films in them; end them all at the end.

    A film stays in the replica where it began, which is the one with the fewest films. A replica
    that is killed ends its own films with an error and is started anew; those of others go on. Ray
    is started on this machine, unless the caller has connected to a cluster already. It takes about
    1 GB of memory before any model.

    The number of replicas is fixed. Each is an application of its own: the router that Ray has for
    sessions maps names to the replicas that are there, so that films would be sent elsewhere
    whenever one comes or goes.

    Args:
        opened: Loads the model in a replica and returns what makes a film of what a viewer asked
            for.
        count: Number of replicas.
        cpus: CPU cores that Ray sets aside for each.
        gpus: GPUs that Ray sets aside for each.

    Raises:
        ImportError: If Ray Serve is not installed.
        ValueError: If `count` is less than 1.
    """
    check_int("count", count, 1)
    ray, serve = ray_serve()
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(
            address="local", num_cpus=max(os.cpu_count() or 1, int(count * cpus) + 1),
            include_dashboard=False, object_store_memory=STORE_BYTES, logging_level="ERROR",
            log_to_driver=False,
        )  # fmt: skip
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    films: list[weakref.WeakSet[RemoteFilm]] = [weakref.WeakSet() for _ in range(count)]
    names = [f"diffcache-{uuid.uuid4().hex[:8]}-{number}" for number in range(count)]
    try:
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            num_replicas=1,
            max_ongoing_requests=BUSY,
            ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        )(Replica)
        handles = serve.run_many([
            serve.RunTarget(deployment.bind(opened), name=name, route_prefix=None) for name in names
        ])  # fmt: skip
        yield _spread(handles, films)
    finally:
        for film in [film for each in films for film in each]:
            film.forget()
        if is_ours:
            serve.shutdown()
            ray.shutdown()
        else:
            for name in names:
                serve.delete(name)


def ray_serve() -> tuple[Any, Any]:
    """Return the modules `ray` and `ray.serve`.

    Raises:
        ImportError: If Ray Serve is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ImportError("replicas need Ray Serve: pip install 'diffcache[ray]'") from error
    return ray, serve


def _spread(handles: list[Any], films: list[weakref.WeakSet[RemoteFilm]]) -> Make:
    """Return what makes a film in the replica with the fewest.

    Args:
        handles: Handles of the replicas.
        films: Films of each, which the new one is added to.
    """
    lock = threading.Lock()

    def make(asked: Any) -> Film:
        with lock:
            number = min(range(len(handles)), key=lambda each: len(films[each]))
            film = RemoteFilm(handles[number])
            films[number].add(film)
        film.begin(asked)  # may take seconds, in which other films are placed
        return film

    return make

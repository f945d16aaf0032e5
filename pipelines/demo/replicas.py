"""Film in other processes: replicas under Ray Serve, each with a model and films of viewers.

>>> with replicas(open_model, count=2) as make:  # doctest: +SKIP
...     film = make(asked)  # a `Film`, made in the replica with the fewest
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from shutil import copytree, rmtree
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from diffcache.method import check_int
from diffcache.pipelines.demo.kept import Pace
from diffcache.pipelines.demo.stream import Film

Make = Callable[[Any], Film]
WAIT = 60.0  # seconds in which a film that lost its replica is restored
_LOOK = 1.0  # seconds between two looks at whether a replica is still there
IDLE = 600.0  # seconds after which a film that nobody asks for is dropped
QUEUE = 2  # where all replicas have so many films, another one is started, up to `count`
BUSY = 100  # films whose next chunk may be asked for at the same time
STORE_BYTES = 100_000_000  # size of Ray's object store, which chunks pass through


class Replica:
    """The films of one process.

    `opened` loads the model and returns a function that makes a film from a viewer's settings; the films have the
    methods `save` and `resume`, which take a folder.
    """

    def __init__(self, opened: Callable[[], Make]) -> None:
        self._make = opened()
        self._films: dict[str, Film] = {}
        self._asked_at: dict[str, float] = {}

    async def call(self, name: str, verb: str, *given: Any) -> tuple[str, Any]:
        """Do something with a film, in a thread of its own.

        The verb is `begin`, `next`, `apply`, `save`, `resume` or `end`, followed by its arguments. Returns `done` and
        the result, `refused` and the reason, or `lost` where there is no such film.
        """
        return await asyncio.to_thread(self._call, name, verb, *given)

    def _call(self, name: str, verb: str, *given: Any) -> tuple[str, Any]:
        try:
            self._asked_at[name] = time.monotonic()
            if verb == "begin":
                self._drop_idle()
                self._films[name] = self._make(*given)
                return "done", (socket.gethostname(), os.getpid())
            if verb == "end":
                self._drop(name)
                return "done", None
            film = self._films.get(name)
            if film is None:
                self._drop(name)
                return "lost", None
            if verb in ("apply", "save", "resume"):
                getattr(film, verb)(*given)
                return "done", None
            return "done", (film.next(*given), film.readings())
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

    It is saved in a folder every few chunks, and goes on from there in another replica where its own is lost. The
    first `least` of the replicas always run, whose `handles` are given; it begins in number `place`.
    """

    def __init__(self, handles: Sequence[Any], place: int, folder: str, least: int) -> None:
        self.place, self._least = place, least
        self._handles, self._name = handles, uuid.uuid4().hex
        self._folder, self._asked = os.path.join(folder, self._name), None
        self._process: tuple[str, int] | None = None  # host and number, where it is known
        self._readings: dict[str, float] = {}
        self._news = ""
        self._made = 0  # chunks
        self._saved: int | None = None  # chunks before the latest save
        self._since: list[Mapping[str, Any]] = []  # orders after it
        self._pace = Pace()
        self._finish()

    def begin(self, asked: Any) -> None:
        """Make the film in its replica, by the settings that the viewer asked for.

        Raises:
            ValueError: If the replica cannot make such a film, or has ended.
        """
        self._asked = asked
        self._process = self._ask("begin", asked)

    def next(self, seen: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the frames of the next chunk, uint8 `[F, H, W, 3]`.

        `seen` are the pictures that it is made from, of the same form; None for a film from text.

        Raises:
            ValueError: If the replica refuses, or has ended and the film was not saved yet.
        """
        made: NDArray[np.uint8]
        made, self._readings = self._ask("next", *(() if seen is None else (seen,)))
        self._made += 1
        self._pace.save(self._made, self._save)
        return made

    def _save(self) -> None:
        self._ask("save", self._folder)
        self._saved, self._since = self._made, []

    def save(self, folder: str) -> None:
        """Write the film into another folder, for `resume`."""
        if self._saved != self._made or self._since:
            self._save()
        copytree(self._folder, folder, dirs_exist_ok=True)

    def resume(self, folder: str) -> None:
        """Go on where another film of these settings was saved."""
        copytree(folder, self._folder, dirs_exist_ok=True)
        self._ask("resume", folder)
        self._saved, self._since = self._made, []

    def apply(self, order: Mapping[str, Any]) -> None:
        """Carry out the viewer's orders before the next chunk.

        Raises:
            ValueError: If it cannot be done; the film goes on as it was.
        """
        self._ask("apply", dict(order))
        self._since.append(dict(order))

    def news(self) -> str:
        """Return that the film was restored, once."""
        news, self._news = self._news, ""
        return news

    def readings(self) -> dict[str, float]:
        """Return the read-outs after the last chunk."""
        return self._readings

    def close(self) -> None:
        """End the film in its replica."""
        self._ends()

    def forget(self) -> None:
        """Stop managing the film because its replica ends."""
        self._ends.detach()
        self._saved = None  # it is restored nowhere
        rmtree(self._folder, ignore_errors=True)

    def _finish(self) -> None:
        """Make sure that the film ends in the replica where it is."""
        handle = self._handles[self.place]
        self._ends = weakref.finalize(self, _end, handle, self._name, self._folder)

    def _ask(self, verb: str, *given: Any) -> Any:
        answer, value = self._call(verb, *given)
        if answer == "lost" and (self._saved is not None or getattr(self._asked, "anew", False)):
            self._restore()
            answer, value = self._call(verb, *given)
        if answer == "refused":
            raise ValueError(value)
        if answer == "lost":
            raise ValueError(_LOST)
        return value

    def _call(self, verb: str, *given: Any) -> tuple[str, Any]:
        from ray.exceptions import RayError

        try:
            response = self._handles[self.place].call.remote(self._name, verb, *given)
            while True:
                try:
                    answer: tuple[str, Any] = response.result(timeout_s=_LOOK)
                    return answer
                except TimeoutError:  # Ray would wait until a killed replica has started anew
                    if self._is_gone():
                        return "lost", None
        except RayError:
            return "lost", None

    def _is_gone(self) -> bool:
        """Return whether the process that the film is in has ended, as far as this host knows."""
        host, number = self._process or ("", 0)
        return host == socket.gethostname() and not psutil.pid_exists(number)

    def _restore(self) -> None:
        """Go on from the latest save, in the first replica that takes the film.

        A film that is made from pictures and was not saved yet begins anew with those that come in.

        Raises:
            ValueError: If none does within a minute.
        """
        lost, latest, self._process = self.place, time.monotonic() + WAIT, None
        orders: list[tuple[str, Any]] = [("apply", order) for order in self._since]
        goes_on = "begins anew"
        if self._saved is not None:
            orders.insert(0, ("resume", self._folder))
            goes_on = f"goes on from chunk {self._saved}, as saved"
        while time.monotonic() < latest:
            for place in self._others(lost):
                self._ends.detach()
                self.place = place
                self._finish()
                answer, process = self._call("begin", self._asked)
                if answer == "done" and all(self._call(*order)[0] == "done" for order in orders):
                    self._process = process
                    self._news = f"the replica of this film ended at chunk {self._made}; it {goes_on}"
                    self._made = self._saved or 0
                    return
            time.sleep(0.2)
        raise ValueError(_LOST)

    def _others(self, lost: int) -> list[int]:
        """Return the replicas that may take the film; its own comes last, as it has to start anew."""
        count = len(self._handles)
        return sorted(range(count), key=lambda n: (n == lost, n >= self._least, (n - lost) % count))


_LOST = "the replica that made this film has ended; start the film again"


def _end(handle: Any, name: str, folder: str) -> None:
    rmtree(folder, ignore_errors=True)
    with suppress(Exception):  # a replica that is gone has no films
        handle.call.remote(name, "end")


@contextmanager
def replicas(
    opened: Callable[[], Make],
    *,
    folder: str,
    count: int = 2,
    least: int | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Iterator[Make]:
    """Start replicas under Ray Serve and yield a maker of films in them; end them all at the end.

    A film begins in the replica with the fewest films. Where a replica is killed, its films go on from their latest
    save in another one, and it is started anew; films of other replicas are not disturbed. Ray is started on this
    machine, unless the caller has connected to a cluster already. It takes about 1 GB of memory before any model.

    Each replica is an application of its own: Ray's router for sessions maps names to the replicas that are there, and
    would send films elsewhere whenever one comes or goes. Ray scales each replica beyond the first `least` between
    none and one: it starts once a film waits for it, which happens where all others have two, and ends after ten
    minutes without requests.

    Args:
        opened: Loads the model in a replica and returns a function that makes a film from a viewer's settings.
        folder: Folder that films are saved in, which all replicas reach.
        count: Most replicas.
        least: Replicas that always run; None for all.
        cpus: CPU cores that Ray sets aside for each.
        gpus: GPUs that Ray sets aside for each.

    Raises:
        ImportError: If Ray Serve is not installed.
        ValueError: If a number is less than 1, or `least` above `count`.
    """
    check_int("count", count, 1)
    least = count if least is None else least
    check_int("least", least, 1)
    if least > count:
        raise ValueError(f"least={least}: must be at most count={count}")
    ray, serve = ray_serve()
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(count * cpus) + 1),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            logging_level="ERROR",
            log_to_driver=False,
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    films: weakref.WeakSet[RemoteFilm] = weakref.WeakSet()
    names = [f"diffcache-{uuid.uuid4().hex[:8]}-{number}" for number in range(count)]
    try:
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            max_ongoing_requests=BUSY, ray_actor_options={"num_cpus": cpus, "num_gpus": gpus}
        )(Replica)
        handles = serve.run_many(
            [
                serve.RunTarget(
                    deployment.options(**scaling(number < least)).bind(opened), name=name, route_prefix=None
                )
                for number, name in enumerate(names)
            ]
        )
        yield _spread(handles, films, folder, least)
    finally:
        for film in list(films):
            film.forget()
        if is_ours:
            serve.shutdown()
            ray.shutdown()
        else:
            for name in names:
                serve.delete(name)


def ray_serve() -> tuple[Any, Any]:
    """Return the modules `ray` and `ray.serve`; raise ImportError if Ray Serve is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ImportError("replicas need Ray Serve: pip install 'diffcache[ray]'") from error
    return ray, serve


def scaling(stays: bool) -> dict[str, Any]:
    """Return the options by which Ray starts and ends a replica; none are needed if it always runs (`stays`)."""
    if stays:
        return {"num_replicas": 1}
    return {
        "autoscaling_config": {
            "min_replicas": 0,
            "initial_replicas": 0,
            "max_replicas": 1,
            "target_ongoing_requests": 1,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": IDLE,
        }
    }


def place_of(films: Sequence[int], least: int) -> int:
    """Return the number of the replica that a new film begins in, given the number of films of each.

    It is the one with the fewest among those that run, as the first `least` always do; where all of these have
    `QUEUE`, it is the next one.
    """
    runs = [place for place, count in enumerate(films) if count or place < least]
    fewest = min(runs, key=films.__getitem__)
    asleep = [place for place in range(len(films)) if place not in runs]
    return asleep[0] if asleep and films[fewest] >= QUEUE else fewest


def _spread(handles: list[Any], films: weakref.WeakSet[RemoteFilm], folder: str, least: int) -> Make:
    """Return a function that makes a film in the replica with the fewest and adds it to `films`; see `place_of`."""
    lock = threading.Lock()

    def make(asked: Any) -> Film:
        with lock:
            places = [film.place for film in films]
            place = place_of([*map(places.count, range(len(handles)))], least)
            film = RemoteFilm(handles, place, folder, least)
            films.add(film)
        film.begin(asked)  # may take seconds, in which other films are placed
        return film

    return make

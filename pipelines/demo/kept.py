"""Keep viewers' films in a folder, so that they go on after the server was started anew."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from diffcache.pipelines.demo.program import Asked, checked_prompt
from diffcache.pipelines.demo.stream import Film

SAVED_EVERY = 4  # chunks after which a film is saved
SHARE = 20  # times that a save took are waited before the next one, so that it costs a twentieth
DAY = 86_400.0  # seconds after which a film goes
_NOTE = "film.json"


class Pace:
    """Moments at which a film is saved: every few chunks, taking at most a twentieth of the time."""

    def __init__(self) -> None:
        self._again = 0.0  # earliest time of the next save

    def save(self, made: int, work: Callable[[], object]) -> None:
        """Save a film by calling `work` if that is due; `made` is the number of its chunks."""
        started = time.monotonic()
        if made % SAVED_EVERY or started < self._again:
            return
        try:
            work()
        finally:  # a save that fails has taken its time as well
            self._again = time.monotonic() + SHARE * (time.monotonic() - started)


class Kept:
    """The latest film of every viewer, in a folder from which old ones are removed.

    A viewer is known by a number that the browser keeps; the folder has only a digest of it. The folder is made if
    need be, and nothing else in it is touched. A film is removed when it is older than `seconds`, and the oldest ones
    while all have more than `most_bytes`.

    Raises:
        OSError: If films cannot be saved there.
    """

    def __init__(self, folder: Path, most_bytes: int, seconds: float = DAY) -> None:
        self.folder, self.most_bytes, self.seconds = folder, most_bytes, seconds
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self._lock = threading.Lock()
        # Viewer -> their present film. A weak reference: a film that has ended, and its cache, are freed.
        self._latest: WeakValueDictionary[str, _KeptFilm] = WeakValueDictionary()
        self.sweep()

    def place(self, viewer: str) -> Path:
        """Return the folder of a viewer's film."""
        return self.folder / hashlib.sha256(viewer.encode()).hexdigest()

    def find(self, viewer: str) -> tuple[Asked, int] | None:
        """Return settings and chunks of a viewer's saved film; None where there is none."""
        if not is_viewer(viewer):
            return None
        self.sweep()  # nothing else does while nobody films
        note = _read(self.place(viewer))
        return None if note is None else note[:2]

    def film(self, viewer: str, asked: Asked, make: Callable[[], Film], goes_on: bool) -> Film:
        """Return a film by `make` that is saved as it is made, and goes on from the viewer's saved one if `goes_on`.

        Raises:
            ValueError: If the saved film is not there any more, or has other settings or another model.
        """
        film = _KeptFilm(self, viewer, asked, make(), goes_on)
        with self._lock:
            self._latest[viewer] = film
        return film

    def save(self, film: _KeptFilm) -> None:
        """Write a film, unless its viewer has begun another one.

        A save that is cut off leaves the previous one in place.

        Raises:
            OSError: If there is no room.
        """
        with self._lock:
            if self._latest.get(film.viewer) is not film:
                return
        place = self.place(film.viewer)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = _read(place)
        turn = "b" if before is not None and before[2] == "a" else "a"
        film.film.save(str(place / turn))  # type: ignore[attr-defined]
        note = {name: value for name, value in vars(film.asked).items() if name != "start"}
        note |= {"made": film.made, "turn": turn}
        (place / "new").touch(mode=0o600)
        (place / "new").write_text(json.dumps(note), encoding="utf-8")
        with self._lock:  # in the meantime another film may have begun, in another tab
            if self._latest.get(film.viewer) is film:
                os.replace(place / "new", place / _NOTE)
        self.sweep()
        if not place.exists():
            raise OSError(errno.EFBIG, "it takes more room than all films may")

    def resume(self, film: _KeptFilm) -> int:
        """Let a film go on from its viewer's saved one; return the number of that one's chunks.

        Raises:
            ValueError: If that is not there any more, or has other settings or another model.
        """
        place = self.place(film.viewer)
        note = _read(place)
        try:
            if note is None:
                raise FileNotFoundError
            film.film.resume(str(place / note[2]))  # type: ignore[attr-defined]
        except FileNotFoundError:
            raise ValueError("your film is not saved any more: start another one") from None
        except ValueError as error:
            told = str(error).replace(str(place), "it")  # viewers are not told the server's paths
            raise ValueError(f"your film cannot go on here, start another one: {told}") from error
        return note[1]

    def sweep(self) -> None:
        """Remove films that are too old, and the oldest ones while all together take too much room."""
        with self._lock:
            room, oldest = self.most_bytes, time.time() - self.seconds
            found = self.folder.iterdir() if self.folder.is_dir() else ()
            ours = [place for place in found if re.fullmatch("[0-9a-f]{64}", place.name)]
            places = [(_changed(place), place) for place in ours]
            for changed, place in sorted(places, reverse=True):
                room -= _bytes(place)
                if room < 0 or changed < oldest:
                    shutil.rmtree(place, ignore_errors=True)


class _KeptFilm:
    """A film that is saved every few chunks."""

    def __init__(self, kept: Kept, viewer: str, asked: Asked, film: Film, goes_on: bool) -> None:
        self.viewer, self.asked, self.film = viewer, asked, film
        self._kept, self._pace, self._news = kept, Pace(), ""
        self.made = 0  # chunks
        if goes_on:
            self.made = kept.resume(self)
            self._news = f"the film goes on from chunk {self.made}, as saved"

    def next(self, seen: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the frames of the next chunk, and save the film if that is due."""
        frames = self.film.next() if seen is None else self.film.next(seen)
        self.made += 1
        try:
            self._pace.save(self.made, lambda: self._kept.save(self))
        except Exception as error:  # the film is worth more than its save
            why = getattr(error, "strerror", None) or type(error).__name__
            self._news = f"the film could not be saved ({why})"
        return frames

    def apply(self, order: Mapping[str, Any]) -> None:
        """Carry out the viewer's orders."""
        self.film.apply(order)
        told = {name: order[name] for name in ("prompt", "policy") if name in order}
        self.asked = replace(self.asked, **told)

    def news(self) -> str:
        """Return the news of the film and of its saves."""
        news, self._news = self._news, ""
        return self.film.news() or news

    def readings(self) -> dict[str, float]:
        """Return the read-outs of the film."""
        return self.film.readings()


def is_viewer(value: object) -> bool:
    """Return whether a value can be a browser's number, which nobody can guess."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _read(place: Path) -> tuple[Asked, int, str] | None:
    """Return settings, chunks and folder of a saved film; None where there is none."""
    try:
        note = json.loads((place / _NOTE).read_text(encoding="utf-8"))
        height, width = map(int, note["size"])
        prompt, policy, seed, steps = (note[name] for name in ("prompt", "policy", "seed", "steps"))
        known = (checked_prompt(prompt), str(policy), int(seed), int(steps), (height, width))
        asked = Asked(*known, anew=bool(note["anew"]))
        return asked, int(note["made"]), "b" if note["turn"] == "b" else "a"
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _bytes(place: Path) -> int:
    """Return the bytes of a film; its files may be replaced in the meantime."""
    count = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):
                count += os.lstat(os.path.join(folder, name)).st_size
    return count


def _changed(place: Path) -> float:
    """Return the time at which a film was saved last."""
    try:
        note = place / _NOTE
        return (note if note.exists() else place).stat().st_mtime
    except OSError:  # another server removed it
        return 0.0

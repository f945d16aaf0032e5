"""Keep the latest pictures of a viewer's camera or file, as JPEGs, for the films made from them."""

from __future__ import annotations

import base64
import binascii
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffcache.pipelines.source_pictures import begin_with, fitted

BEGINS, ANEW = "begin", "anew"  # what a film does with the pictures
MOST_FILES = 64  # pictures that come in one request
MOST_SIDE = 1024  # pixels of a picture's longer side, where no sizes of films are known
MOST_SCANS = 20  # of a JPEG, each of which is a pass over all of it; a page sends 1
FRESH = 5.0  # seconds in which a source that is on sends something
_TICK = 0.1  # seconds between two looks at whether to stop


@dataclass(frozen=True)
class Shot:
    """A picture of a source, as a JPEG.

    Attributes:
        number: Number of it, counted with those that the page left out.
        arrived: Time at which it came in, by `time.monotonic`.
    """

    number: int
    arrived: float
    file: bytes


class Source:
    """The latest pictures of one viewer; nothing is written to disk.

    At most `most` pictures are kept; `side` is the most pixels of a picture's longer side. `use` is `begin` for a film
    that goes on from the pictures, `anew` for one that is made from them.
    """

    def __init__(self, most: int, side: int = MOST_SIDE) -> None:
        self.use, self.side = BEGINS, side
        self._shots: deque[Shot] = deque(maxlen=most)
        self._count = 0  # number of pictures so far, with those that the page left out
        # The same number as the page counts it; None while the source is off.
        self._page_count: int | None = None
        self._changed = threading.Condition()

    def put(self, value: Any) -> None:
        """Take pictures from a page, as `checked_pictures` reads them; a message without any turns the source off.

        Raises:
            ValueError: If it is something else.
        """
        self.take(*checked_pictures(value))

    def take(self, use: str, first: int, files: Sequence[bytes]) -> None:
        """Take pictures that were checked; arguments are those that `checked_pictures` returns."""
        with self._changed:
            if not files or not self._is_on():
                self._shots.clear()  # they are of an earlier camera or file
                self._page_count = None
            if files:
                self.use, now = use, time.monotonic()
                before = first if self._page_count is None else self._page_count
                self._count += max(0, first - before)
                self._page_count = first + len(files)
                for file in files:
                    self._shots.append(Shot(self._count, now, file))
                    self._count += 1
            self._changed.notify_all()

    @property
    def is_on(self) -> bool:
        """Return whether pictures come in."""
        with self._changed:
            return self._is_on()

    def _is_on(self) -> bool:
        return bool(self._shots) and time.monotonic() - self._shots[-1].arrived < FRESH

    def latest(self, size: tuple[int, int], each: int) -> NDArray[np.uint8]:
        """Return the pictures that a film goes on from, uint8 `[F, H, W, 3]`.

        `size` is height and width in pixels, `each` the pictures of a latent frame after the first.

        Raises:
            ValueError: If one is no JPEG, or there are none.
        """
        with self._changed:
            files = [shot.file for shot in self._shots]
        return begin_with((opened(file, self.side) for file in files), size, each)

    def after(self, number: int) -> list[Shot]:
        """Return the kept pictures from a number on; the caller holds the lock."""
        return [shot for shot in self._shots if shot.number >= number]


class Reader:
    """One film's way through the pictures of a source, from the moment that it is made.

    Where two chunks wait, it skips to the later one, so that a film falls no further behind. The first chunk takes
    `first` pictures, each later one `later`; `size` is their height and width in pixels.

    Attributes:
        dropped: Number of pictures that were left out, here or by the page.
        arrived: Time at which the oldest picture of the latest chunk came in, by `time.monotonic`.
    """

    def __init__(self, source: Source, size: tuple[int, int], first: int, later: int) -> None:
        self._source, self._size, self._wanted, self._later = source, size, first, later
        self._at = source._count
        self.dropped, self.arrived = 0, 0.0

    def take(self, stopped: Callable[[], bool]) -> NDArray[np.uint8] | None:
        """Wait for the pictures of a chunk, uint8 `[F, H, W, 3]`.

        Returns None once no more come in, or `stopped` returns True because nobody wants them.

        Raises:
            ValueError: If one is no JPEG.
        """
        with self._source._changed:
            while len(waiting := self._source.after(self._at)) < self._wanted:
                if stopped() or not self._source._is_on():
                    return None
                self._source._changed.wait(_TICK)
            start = len(waiting) - self._wanted if len(waiting) >= 2 * self._later else 0
            taken = waiting[start : start + self._wanted]
        self.dropped += taken[-1].number + 1 - self._at - len(taken)
        self._at, self.arrived = taken[-1].number + 1, taken[0].arrived
        self._wanted = self._later
        side = self._source.side
        return np.stack([fitted(opened(shot.file, side), self._size) for shot in taken])


def opened(file: bytes, side: int = MOST_SIDE) -> Image.Image:
    """Return the picture of a JPEG.

    Raises:
        ValueError: If it is none, its longer side has more than `side` pixels, or it has too many scans.
    """
    if (scans := file.count(b"\xff\xda")) > MOST_SCANS:  # a small file may take minutes
        raise ValueError(f"a picture has {scans} scans, at most {MOST_SCANS} are read; send a baseline JPEG")
    try:
        with Image.open(io.BytesIO(file), formats=["JPEG"]) as image:
            if max(image.size) > side:
                wide, tall = image.size
                raise ValueError(f"a picture has {wide} x {tall} pixels; scale its longer side to at most {side}")
            return image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError("a picture cannot be read: it must be a JPEG") from error


def checked_pictures(value: Any) -> tuple[str, int, list[bytes]]:
    """Return the use, the number of the first picture and the JPEG files of a page's message.

    The message is an object with `use`, `first`, the number of the first picture, and `files`, JPEGs in base64.

    Raises:
        ValueError: If it is something else.
    """
    try:
        if not isinstance(value, Mapping) or value["use"] not in (BEGINS, ANEW):
            raise ValueError
        first, coded = value["first"], value["files"]
        if type(first) is not int or first < 0 or len(coded) > MOST_FILES:
            raise ValueError
        return value["use"], first, [base64.b64decode(file, validate=True) for file in coded]
    except (LookupError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError("these are no pictures of the page") from error

"""Progress of a run: samples done, and the time that those left will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffcache.pipelines.demo.console import progress

Show = Callable[[int, int, str], None]


class Progress:
    """Counts samples, those of timed calls too; the time left follows from those that were drawn.

    Args:
        show: Shows samples done, samples in all and what is going on; None shows nothing.
    """

    def __init__(self, show: Show | None = None) -> None:
        self._show_samples = show
        self.done = self.total = self.drawn = 0
        self._started = time.monotonic()

    def expect(self, total: int) -> None:
        """Say how many samples there are in all; may be called again."""
        self.total = total
        self.say("")

    def advance(self, count: int, label: str, drawn: bool = True) -> None:
        """Count samples; `drawn` tells whether they took time."""
        self.done += count
        self.drawn += count if drawn else 0
        self.say(label)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._show_samples is not None:
            print(text, file=sys.stderr, flush=True)  # above a bar, which redirects it

    def say(self, label: str) -> None:
        """Name the work under way."""
        if self._show_samples is not None:
            left = self.seconds_left
            eta = "" if left is None else f", {left // 60:.0f}:{left % 60:02.0f} left"
            self._show_samples(self.done, self.total, f"{label}{eta}")

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the pace so far, None before anything was drawn."""
        if not self.drawn or not self.total:
            return None
        pace = (time.monotonic() - self._started) / self.drawn
        return pace * max(self.total - self.done, 0)


@contextmanager
def shown(quiet: bool = False) -> Iterator[Progress]:
    """Yield a `Progress` that is drawn on standard error."""
    if quiet:
        yield Progress()
        return
    with progress("samples:") as show:
        yield Progress(show)

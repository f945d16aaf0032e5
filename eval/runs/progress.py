"""Progress of a run: a bar with the time left on a terminal, a line now and then without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVERY_SECONDS = 30.0


class Progress:
    """Counts samples, those of timed calls too; the time left follows from those that were drawn.

    Args:
        bar: A `rich` progress bar, None for plain lines on standard error.
        quiet: Show nothing.
    """

    def __init__(self, bar: Any = None, quiet: bool = False) -> None:
        self._bar, self._quiet = bar, quiet
        self._task = None if bar is None else bar.add_task("starting", total=None)
        self.done = self.total = self.drawn = 0
        self._started = self._told = time.monotonic()

    def expect(self, total: int) -> None:
        """Say how many samples there are in all; may be called again."""
        self.total = total
        self._show("")

    def advance(self, count: int, label: str, drawn: bool = True) -> None:
        """Count samples; `drawn` tells whether they took time."""
        self.done += count
        self.drawn += count if drawn else 0
        self._show(label)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def say(self, label: str) -> None:
        """Name what is going on."""
        self._show(label)

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the pace so far, None before anything was drawn."""
        if not self.drawn or not self.total:
            return None
        pace = (time.monotonic() - self._started) / self.drawn
        return pace * max(self.total - self.done, 0)

    def _show(self, label: str) -> None:
        if self._quiet:
            return
        left = self.seconds_left
        eta = "" if left is None else f", {left // 60:.0f}:{left % 60:02.0f} left"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.done, total=self.total or None,
                description=f"{label or 'samples'}{eta}", refresh=True,
            )  # fmt: skip
        elif label and time.monotonic() - self._told > _EVERY_SECONDS:
            self._told = time.monotonic()
            print(f"{label}: {self.done}/{self.total} samples{eta}", file=sys.stderr, flush=True)


@contextmanager
def shown(quiet: bool = False) -> Iterator[Progress]:
    """Yield a `Progress` that is drawn on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    screen = Console(stderr=True)
    if quiet or not screen.is_terminal:
        yield Progress(quiet=quiet)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=screen, auto_refresh=False, transient=True) as bar:
        yield Progress(bar)

"""The processes of a run under `accelerate launch`, or a single one; a count of samples, and the time left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from diffcache.eval.cost.interleave import cores_here
from diffcache.pipelines.demo.console import progress

_PATIENCE = timedelta(days=7)  # ranks wait for the slowest, whatever a batch takes


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    index: int = 0  # number of this process, from 0; the first one reports
    count: int = 1  # number of processes
    local: int = 0  # place on its machine
    beside: int = 1  # number of processes on its machine

    @property
    def workers(self) -> int:
        """Threads of this process among the cores of its machine."""
        return max(1, cores_here() // self.beside)

    @property
    def is_first(self) -> bool:
        """Return whether this process reports."""
        return self.index == 0

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def close(self) -> None:
        """Leave the group of processes."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().destroy_process_group()


def join(device: str) -> Ranks:
    """Join the processes that a launcher started, or be alone.

    Batches are dealt out by their number, so that every number of processes draws the same samples; the run's
    folder must be one that all hosts see. On the device `cpu` the processes meet over gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    import torch
    from accelerate import PartialState

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
    return Ranks(state.process_index, state.num_processes, state.local_process_index, beside)


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
        """Show the name of the work under way."""
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

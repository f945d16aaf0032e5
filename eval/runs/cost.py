"""Cost of the cases of a run: seconds in turn, and peak memory of a fresh process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.cost.interleave import Turn, measure
from diffcache.eval.cost.memory import Place, peak, peak_bytes
from diffcache.eval.record import Setting
from diffcache.eval.runs.evaluate import WARM_UP, Run
from diffcache.eval.runs.folder import remember
from diffcache.eval.runs.peers import Peer
from diffcache.eval.runs.task import Case, digest
from diffcache.features.base import Method
from diffcache.features.combine import reuse_of
from diffcache.pipelines.demo.saved import DTYPES

UNTIMED_STEPS = 4  # masks of steps are for no fewer


def costs(run: Run, cases: Sequence[Case]) -> dict[str, Any]:
    """Return `rows` (case -> seconds, ratio, throughput, bytes) and a `warning` or None.

    Kept until settings or device change; empty where nothing is to be timed.

    Raises:
        MeasureError: If a process whose memory was to be measured failed.
    """
    setting = Setting(run.drawer.device, DTYPES[run.drawer.dtype])
    names = [(case.name, case.digest(run.drawer.about)) for case in cases]
    key = digest([names, run.plan.rounds, setting.device_name])
    kept: dict[str, Any] = {"rows": {}, "warning": None}
    if run.plan.rounds:
        place = run.folder / "times.json"
        kept = remember(place, key, lambda: _times(run, cases, setting))
        left = run.progress.total - run.progress.done  # times that were kept
        run.progress.advance(left, "time", drawn=False)
    if run.plan.memory or setting.device.type == "cuda":
        key = digest([names, setting.device_name])
        peaks = remember(run.folder / "memory.json", key, lambda: _peaks(run, cases))
        for name, count in peaks.items():
            kept["rows"].setdefault(name, {})["peak_bytes"] = count
    return kept


def _times(run: Run, cases: Sequence[Case], setting: Setting) -> dict[str, Any]:
    turns = {case.name: _Turns(run, case, setting).turn() for case in cases}
    size = len(run.batches[0].ids)

    def show(done: int, total: int, name: str) -> None:
        run.progress.advance(size if done else 0, f"time {name}, {done} of {total}")

    timings = measure(turns, run.plan.rounds, WARM_UP, replace(setting, progress=show))
    return {"rows": timings.rows(size), "warning": timings.warning}


class _Turns:
    """A case's turns: the cache goes in, learns in a few untimed steps, then one batch is timed.

    The first batch of the run is drawn.
    """

    def __init__(self, run: Run, case: Case, setting: Setting) -> None:
        self.run, self.case, self.setting = run, case, setting
        self.clock = DenoiserClock(run.drawer.pipe, setting)

    def turn(self) -> Turn:
        """Return the turn of this row in interleaved timing."""
        return Turn(self.draw, self.within, self.prepare, self.readings)

    def draw(self) -> None:
        """Draw the batch."""
        self.run.drawer.draw(self.case, self.run.batches[0], timed=True)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Put the cache in for a turn, and the clock around it."""
        with self.run.drawer.wrapped(self.case), self.clock:
            yield

    def prepare(self) -> None:
        """Draw a few steps untimed, or all for a method that is made for their number; reset."""
        steps = self.case.steps if self._is_bound() else min(UNTIMED_STEPS, self.case.steps)
        short = Case(self.case.name, self.case.kind, steps, self.case.method)
        self.run.drawer.draw(short, self.run.batches[0], timed=True)
        self.clock.reset()
        self.setting.wait()

    def _is_bound(self) -> bool:
        method = self.case.method
        if not isinstance(method, Method):
            return False
        reuse = reuse_of(method)
        return bool(method.total or (reuse is not None and reuse.when.total))

    def readings(self) -> Mapping[str, float | None]:
        """Return seconds within the denoiser."""
        return {"denoiser_seconds": self.clock.seconds}


def _peaks(run: Run, cases: Sequence[Case]) -> dict[str, int]:
    """Return the most memory in use in a call of each case.

    On an accelerator what torch allocated, in this process, which holds the weights already; on
    the CPU resident memory, which only a fresh process can tell.
    """
    task, batch = run.plan.task, run.batches[0]
    found = {}
    for case in cases:
        run.progress.say(f"memory of {case.name}")
        if run.drawer.device.type == "cuda":
            turns = _Turns(run, case, Setting(run.drawer.device))
            with turns.within():
                turns.prepare()
                found[case.name] = peak(turns.draw, run.drawer.device)
            continue
        if isinstance(case.method, Peer):
            continue  # the fresh process makes methods of the catalogue only
        call = run.drawer.arguments(batch, case.steps)
        call.pop("generator", None)  # noise takes the same memory whatever its seed
        method = None if case.method is None else _spelled(case.method)
        place = Place("cpu", run.drawer.dtype, task.threads, task.loading)
        found[case.name] = peak_bytes(task.model, method, call, place)
    return found


def _spelled(method: Method) -> str:
    """Return the words from which `parse_method` makes a method: its name and all its settings.

    A method that is in no catalogue has no name, and the words are refused as such.
    """
    return f"{method.name}:{repr(method).partition('(')[2][:-1]}"

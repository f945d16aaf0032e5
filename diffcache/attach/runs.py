"""Sampling runs of a wrapped pipeline or denoiser: where they start and end, in every thread."""

from __future__ import annotations

import asyncio
import functools
import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from diffcache.anchor import Attached
from diffcache.attach.branches import alike, keep
from diffcache.attach.call import Call
from diffcache.attach.provenance import tables_of
from diffcache.attach.record import RunRecord
from diffcache.attach.run import Run, RunStream
from diffcache.attach.signature import tensors_in
from diffcache.errors import AttachError, CacheWarning
from diffcache.features.base import Method
from diffcache.features.collect import Observer
from diffcache.features.combine import reuse_of
from diffcache.step import CURRENT

ATTACHING = threading.RLock()  # held while a method is attached or detached, and as a run begins


class RunPlace:
    """Stands for a run in the context of a thread or task; the handle, not the context, owns it.

    So a run ends with whichever goes first, and no context keeps a model alive.
    """

    __slots__ = ("__weakref__", "origin", "run")

    def __init__(self, run: Run) -> None:
        self.run = weakref.ref(run)
        self.origin = _here()  # thread and task that started the run


Places = weakref.WeakKeyDictionary["Runs", RunPlace]
_PLACES: ContextVar[Places | None] = ContextVar("diffcache_places", default=None)
Methods = weakref.WeakKeyDictionary["Runs", Method]
_METHODS: ContextVar[Methods | None] = ContextVar("diffcache_methods", default=None)


class Runs(Attached):
    """The sampling runs of a pipeline or denoiser.

    Args:
        target: The pipeline or denoiser.
        method: The method that it is wrapped with.
        observer: Observer of the features, outputs and guided outputs of every step, for
            calibration; None for none.
    """

    method: Method

    def __init__(self, target: Any, method: Method, observer: Observer | None = None) -> None:
        self.method, self.observer = method, observer
        self.tables = tables_of(method)
        self.target = weakref.ref(target)
        self.last = RunRecord()
        self._runs: weakref.WeakKeyDictionary[RunPlace, Run] = weakref.WeakKeyDictionary()

    @property
    def scheduler(self) -> Any:
        """The pipeline's scheduler, None for a bare model."""
        return getattr(self.target(), "scheduler", None)

    # what an attached method adds, in `attach.handle.Handle` ----------------------------------

    @abstractmethod
    def follow(self, pipeline: Any) -> None:
        """Listen to the pipeline's scheduler, which users replace."""

    @abstractmethod
    def replaced(self, pipeline: Any) -> Iterator[str]:
        """Yield a remark for every denoiser in whose place the pipeline has another by now."""

    @property
    @abstractmethod
    def watches_steps(self) -> bool:
        """True where an extension looks at the arguments of the scheduler's step."""

    @abstractmethod
    def set_times(self, scheduler: Any) -> None:
        """Tell of the times that the scheduler was just given."""

    @abstractmethod
    def stepping(self, scheduler: Any, given: dict[str, Any]) -> None:
        """Tell of a step of the scheduler before it is taken."""

    @abstractmethod
    def bytes_of(self, run: Run) -> int:
        """Return the bytes that all denoisers keep of a run."""

    # where runs start and end ----------------------------------------------------------------

    def run(self) -> Run:
        """Return the run of this thread or task, a new one if there is none.

        One that began with a call, not with `told`, is its thread's or task's alone: those that are
        started later copy the context, but do their own sampling.
        """
        places = _PLACES.get()  # as `_around`, with no call: every step comes here
        place = None if places is None else places.get(self)
        run = None if place is None else place.run()
        if place is None or run is None:
            return self.begin()[0]
        return run if run.in_pipeline or run.is_told or place.origin == _here() else self.begin()[0]

    def _place(self) -> RunPlace | None:
        places = _PLACES.get()
        return None if places is None else places.get(self)

    def _around(self) -> Run | None:
        """Return the run that this thread or task is in, whoever began it; None for none."""
        place = self._place()
        return None if place is None else place.run()

    def _check_no_run(self, way_out: str) -> None:
        """Raise AttachError if the user opened a run in this thread or task."""
        place, around = self._place(), self._around()
        if place is not None and around is not None and around.is_told and place.origin == _here():
            raise AttachError(f"a diffcache.run of this model is open in this thread{way_out}")

    def begin(
        self,
        in_pipeline: bool = False,
        is_told: bool = False,
        steps: int | None = None,
        stream: RunStream | None = None,
    ) -> tuple[Run, Any]:
        """Start a run in this thread or task; return it with the token that ends it.

        It is a part of the stream that the user opened around it, else it has one of its own.
        """
        around = self._around()
        if stream is None and around is not None and around.stream.is_told:
            stream = around.stream
        run = Run(in_pipeline, is_told, steps, stream)
        self.last = run.record
        place = RunPlace(run)
        with ATTACHING:
            self._runs[place] = run
        places: Places = weakref.WeakKeyDictionary(_PLACES.get() or {})
        places[self] = place
        return run, _PLACES.set(places)

    def end(self, run: Run, token: Any, finished: bool) -> None:
        """End a run started with `begin`: free its features and warn if it skipped nothing."""
        self.settle()
        run.drop()
        if not run.stream.is_told:
            run.stream.drop()
        for place, live in self.live():
            if live is run:
                del self._runs[place]
        _PLACES.reset(token)
        if self.last is not run.record and all(call.writes for call in run.record.calls):
            return  # its steps were those of runs inside, such as a pipeline's calls
        self.last = run.record
        run.record.finished = finished
        if finished:
            self._check_skipped(run.record)

    def live(self) -> list[tuple[RunPlace, Run]]:
        """Return the runs of all threads and tasks with their places."""
        places = [ref() for ref in self._runs.keyrefs()]  # a copy: other threads begin and end runs
        runs = [(place, place.run()) for place in places if place is not None]
        return [(place, run) for place, run in runs if run is not None]

    def check_idle(self) -> None:
        """Raise AttachError if another thread or task is in a run whose end will be said."""
        if any(run.is_said and place.origin != _here() for place, run in self.live()):
            raise AttachError(
                "a sampling run of this model is open in another thread or task; unwrap it when "
                "that has ended, or give runs settings of their own: diffcache.settings"
            )

    @contextmanager
    def told(self, steps: int | None, sigmas: Sequence[float] = ()) -> Iterator[None]:
        """Make the calls inside one run, of `steps` steps if they are known, with noise levels if they are known.

        Raises AttachError if a run is open already in this thread or task.
        """
        self.settle()
        self._check_no_run(" already; end it first, or sample in another thread or task")
        run, token = self.begin(is_told=True, steps=steps)
        run.sigmas = sigmas
        finished = False
        try:
            yield
            finished = True
        finally:
            self.end(run, token, finished)

    @property
    def chosen(self) -> Method:
        """The method of runs that start in this thread or task."""
        methods = _METHODS.get()
        return self.method if methods is None else methods.get(self, self.method)

    @contextmanager
    def choosing(self, method: Method) -> Iterator[None]:
        """Let the runs that start inside have another method."""
        methods: Methods = weakref.WeakKeyDictionary(_METHODS.get() or {})
        methods[self] = method
        token = _METHODS.set(methods)
        try:
            yield
        finally:
            _METHODS.reset(token)

    @contextmanager
    def streaming(self) -> Iterator[RunStream]:
        """Let the runs inside be one stream, as the user says.

        Raises AttachError if one, or a run, is open already in this thread or task.
        """
        self.settle()
        around = self._around()
        if around is not None and around.stream.is_told:
            raise AttachError(
                "a diffcache.stream of this model is open in this thread already; end it first, or "
                "stream in another thread or task"
            )
        self._check_no_run(": a stream is made of runs, so open diffcache.stream around them")
        stream = RunStream(is_told=True)
        run, token = self.begin(stream=stream)
        finished = False
        try:
            yield stream
            finished = bool(run.record.calls)
        finally:
            stream.drop()
            stream.is_told = False  # threads that it was handed to have streams of their own now
            self.end(run, token, finished)

    def aside(self, run: Run, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pipeline's callback whose own calls of the denoisers are no part of its run.

        Where it changes the prompt, by other tensors or in place, the guidance branches of the run start anew.
        """

        @functools.wraps(callback)
        def apart(*args: Any, **kwargs: Any) -> Any:
            given = next((each for each in (*args, *kwargs.values()) if isinstance(each, dict)), {})
            names = [name for name in given if "latents" not in name]
            before = keep(tensors_in({name: given[name] for name in names}))
            places: Places = weakref.WeakKeyDictionary(_PLACES.get() or {})
            places.pop(self, None)
            token = _PLACES.set(places)
            try:
                made = callback(*args, **kwargs)
            finally:
                _PLACES.reset(token)
            after = {**given, **made} if isinstance(made, dict) else given
            if not alike(before, tensors_in({name: after.get(name) for name in names})):
                for timeline in run.timelines.values():
                    timeline.branches.clear()
            return made

        return apart

    def restart(self, times: Sized | None) -> None:
        """Start the run anew at `set_timesteps`; within a pipeline's call it stays one record."""
        self.settle()
        run = self.run()
        run.restart(times)
        if not run.in_pipeline:
            self.new_record(run)

    def new_record(self, run: Run) -> None:
        """Give a run outside a pipeline's call a new record; the last one is finished."""
        if run.record.calls:
            run.record.finished = True
            self._check_skipped(run.record)
            run.record = RunRecord()
        self.last = run.record

    def remark(self, run: Run, remarks: Iterable[str]) -> None:
        """Warn of a run that differs from its calibration or the like, once a run."""
        for text in remarks:
            if text not in run.record.remarks:
                run.record.remarks.append(text)
                warnings.warn(text, CacheWarning, stacklevel=3)

    def abandon(self, call: Call | None = None, writes: bool = False) -> None:
        """Forget this thread's features after an exception inside a denoiser, and a stream that it failed to write to.

        `call` failed, None for one that was not open yet; `writes` says whether that was to write to a stream.
        """
        run = self.run() if call is None else call.run
        run.drop()
        if writes if call is None else call.writes:
            run.stream.drop()

    def settle(self) -> None:
        """Clean up after an interrupt in this thread, which no module hook sees."""
        stale = self.leave()
        if stale is not None:
            self.abandon(stale)
            stale.storage.clear()  # which may refer to the call, and so keep the model alive

    def reset(self) -> None:
        """Forget the features of every run and the contents of every stream.

        What another thread or task is in the midst of goes at its end, which will be said.
        """
        self.leave()
        for place, run in self.live():
            if place.origin == _here() or not run.is_said:
                run.drop()
                run.stream.drop()

    def leave(self) -> Call | None:
        """Leave the denoiser call that an interrupt left open in this thread; return it."""
        call: Call | None = CURRENT.get()
        if call is None or getattr(call.owner, "handle", None) is not self:
            return None
        CURRENT.set(None)
        return call

    def _check_skipped(self, record: RunRecord) -> None:
        """Warn if a run of more than one step skipped nothing."""
        if not record.calls and not record.remarks:
            _warn(f"{self.method!r}: the run called no wrapped denoiser, so nothing was cached")
            return
        calls = [call for call in record.calls if not call.writes]
        steps = len({(call.denoiser, call.index) for call in calls})
        reuses_alone = reuse_of(self.method) is not None and len(self.method.abilities()) == 1
        if record.skipped or steps < 2 or self.observer is not None or not reuses_alone:
            return
        reasons = {call.reason for call in calls[1:]} - {"method"}
        why = f" ({', '.join(sorted(reasons))})" if reasons else ""
        method = record.method or self.method
        _warn(
            f"{method!r} skipped nothing in a run of {steps} steps{why}: every step was computed; "
            "use more steps, a shorter warmup or a larger interval or threshold"
        )


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=5)


def _here() -> tuple[int, Any]:
    """Return the thread, and a weak reference to the task that is running; None outside of tasks."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    return threading.get_ident(), None if task is None else weakref.ref(task)

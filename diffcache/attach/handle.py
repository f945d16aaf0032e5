"""What attaching returns: the taps on a pipeline, its scheduler and its denoisers, as one thing."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.anchor import owner_of
from diffcache.attach.clock import Run
from diffcache.attach.conditions import tables_of
from diffcache.attach.context import listen, unlisten
from diffcache.attach.engine import Engine
from diffcache.attach.facts import facts_of
from diffcache.attach.reuse.frame import Frame
from diffcache.attach.hooks import leave
from diffcache.attach.place import Place
from diffcache.attach.record import Call, RunRecord
from diffcache.attach.solver import tap_pipeline, tap_scheduler, untap
from diffcache.errors import AttachError, CacheWarning
from diffcache.features.base import FeatureMethod
from diffcache.features.collect import Observer

Places = weakref.WeakKeyDictionary["Handle", Place]
_PLACES: ContextVar[Places | None] = ContextVar("diffcache_places", default=None)


class Handle:
    """A method attached to a pipeline or a model; a context manager that detaches at its end.

    Args:
        target: A pipeline or a denoiser.
        denoisers: Name -> denoiser.
        method: The method for all of them; each keeps its own state.
        observer: Sees the features, outputs and guided outputs of every step, for calibration.

    Raises:
        AttachError: If a denoiser cannot be cached with this method.
    """

    def __init__(
        self,
        target: Any,
        denoisers: dict[str, nn.Module],
        method: FeatureMethod,
        *,
        observer: Observer | None = None,
    ) -> None:
        self.method, self.observer = method, observer
        self.tables = tables_of(method)
        self.target = weakref.ref(target)
        self.last = RunRecord()
        self._runs: weakref.WeakKeyDictionary[Place, Run] = weakref.WeakKeyDictionary()
        self.schedulers: list[Any] = []
        self.engines: list[Engine] = []
        anatomies = {name: anatomy_of(model) for name, model in denoisers.items()}
        try:
            for name, model in denoisers.items():
                self.engines.append(Engine(self, name, model, method, anatomies[name]))
                listen(model)
            if not isinstance(target, nn.Module):
                tap_pipeline(target, self)
                self.follow(target)
        except BaseException:
            self.detach()
            raise

    # runs ----------------------------------------------------------------------------------

    def run(self) -> Run:
        """Return the run of this thread or task, a new one if there is none.

        One that nobody began in so many words is its thread's or task's alone: those that are
        started later copy the context, but do their own sampling.
        """
        place = self._place()
        run = None if place is None else place.run()
        if place is None or run is None:
            return self.begin()[0]
        if run.in_pipeline or run.is_told or place.is_here:
            return run
        return self.begin()[0]

    def _place(self) -> Place | None:
        places = _PLACES.get()
        return None if places is None else places.get(self)

    def begin(
        self, in_pipeline: bool = False, is_told: bool = False, steps: int | None = None
    ) -> tuple[Run, Any]:
        """Start a run in this thread or task; return it with the token that ends it."""
        run = Run(in_pipeline, is_told, steps)
        self.last = run.record
        place = Place(run)
        self._runs[place] = run
        places: Places = weakref.WeakKeyDictionary(_PLACES.get() or {})
        places[self] = place
        return run, _PLACES.set(places)

    def end(self, run: Run, token: Any, finished: bool) -> None:
        """End a run started with `begin`: free its features and speak up if it skipped nothing."""
        run.drop()
        for place in [place for place, live in self._runs.items() if live is run]:
            del self._runs[place]
        _PLACES.reset(token)
        self.last = run.record
        run.record.finished = finished
        if finished:
            self._speak_up(run.record)

    @contextmanager
    def told(self, steps: int | None) -> Iterator[None]:
        """Let the calls inside be one run, as the user says.

        Raises:
            AttachError: If one is open already in this thread or task.
        """
        place = self._place()
        around = None if place is None else place.run()
        if place is not None and around is not None and around.is_told and place.is_here:
            raise AttachError(
                "a diffcache.run of this model is open in this thread already; end it first, or "
                "sample in another thread or task"
            )
        run, token = self.begin(is_told=True, steps=steps)
        finished = False
        try:
            yield
            finished = True
        finally:
            self.end(run, token, finished)

    def aside(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pipeline's callback whose own calls of the denoisers are no part of its run."""

        @functools.wraps(callback)
        def apart(*args: Any, **kwargs: Any) -> Any:
            places: Places = weakref.WeakKeyDictionary(_PLACES.get() or {})
            places.pop(self, None)
            token = _PLACES.set(places)
            try:
                return callback(*args, **kwargs)
            finally:
                _PLACES.reset(token)

        return apart

    def restart(self, length: int | None) -> None:
        """Start the run anew at `set_timesteps`; within a pipeline's call it stays one record."""
        run = self.run()
        run.restart(length)
        if not run.in_pipeline:
            self.new_record(run)

    def new_record(self, run: Run) -> None:
        """Give a run outside a pipeline's call a new record; the last one is finished."""
        if run.record.calls:
            run.record.finished = True
            self._speak_up(run.record)
            run.record = RunRecord()
        self.last = run.record

    @property
    def scheduler(self) -> Any:
        """The pipeline's scheduler, None for a bare model."""
        return getattr(self.target(), "scheduler", None)

    @property
    def watches_steps(self) -> bool:
        """Whether anything looks at what the scheduler steps with."""
        return self.observer is not None or any(engine.extensions for engine in self.engines)

    def set_times(self, scheduler: Any) -> None:
        """Let extensions see, or change, the times that the scheduler was just given."""
        if self.observer is not None:
            self.observer.times(scheduler)
        for engine in self.engines:
            for extension in engine.extensions:
                extension.timesteps(scheduler)

    def stepping(self, scheduler: Any, given: dict[str, Any]) -> None:
        """Tell of a step of the scheduler before it is taken: the guided output is complete."""
        output, sample = given.get("model_output"), given.get("sample")
        if not isinstance(output, Tensor) or not isinstance(sample, Tensor):
            return
        run = self.run()
        for engine in self.engines:
            for extension in engine.extensions:
                extension.stepping(run, scheduler, output, given.get("timestep"), sample)
        timeline = next((run.timelines[e] for e in self.engines if e in run.timelines), None)
        if self.observer is not None and timeline is not None and timeline.index >= 0:
            self.observer.guided(timeline.step(0), sample, output)

    def remark(self, run: Run, remarks: Iterable[str]) -> None:
        """Warn of what a run should not be, such as unlike the calibration, once a run."""
        for text in remarks:
            if text not in run.record.remarks:
                run.record.remarks.append(text)
                warnings.warn(text, CacheWarning, stacklevel=3)

    def abandon(self) -> None:
        """Forget this thread's features after an exception inside a denoiser."""
        self.run().drop()

    def reset(self) -> None:
        """Forget the features of every run, in every thread."""
        leave(self)
        for run in list(self._runs.values()):
            run.drop()

    def note(self, frame: Frame, call: Call) -> None:
        """Add a call to the record of its run."""
        run = frame.timeline.run
        run.record.calls.append(call)
        if frame.computes:
            held = sum(tensor.nbytes for tensor in self._tensors([run])) + self._extra_bytes([run])
            run.record.peak_bytes = max(run.record.peak_bytes, held)

    def _speak_up(self, record: RunRecord) -> None:
        """Warn if a run of more than one step skipped nothing."""
        if not record.calls and not record.remarks:
            _warn(f"{self.method!r}: the run called no wrapped denoiser, so nothing was cached")
            return
        steps = len({(call.denoiser, call.index) for call in record.calls})
        if record.skipped or steps < 2 or self.observer is not None or self.method.abilities():
            return
        reasons = {call.reason for call in record.calls[1:]} - {"method"}
        why = f" ({', '.join(sorted(reasons))})" if reasons else ""
        _warn(
            f"{self.method!r} skipped nothing in a run of {steps} steps{why}: every step was "
            "computed; use more steps, a shorter warmup or a larger interval or threshold"
        )

    def _tensors(self, runs: list[Run]) -> Iterator[Tensor]:
        for run in runs:
            for engine in self.engines:
                yield from engine.tensors(run)

    def held_bytes(self) -> int:
        """Return the bytes of all features held now, each storage once."""
        storages: dict[int, int] = {}
        for tensor in self._tensors(list(self._runs.values())):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values()) + self._extra_bytes(list(self._runs.values()))

    def _extra_bytes(self, runs: list[Run]) -> int:
        """Return the bytes that extensions keep of runs, or beyond them."""
        return sum(
            extension.held_bytes(runs) for engine in self.engines for extension in engine.extensions
        )

    # attaching -----------------------------------------------------------------------------

    def follow(self, pipeline: Any) -> None:
        """Listen to the pipeline's scheduler, which users replace.

        Raises:
            AttachError: If the method does not serve the scheduler.
            TablesError: If its tables were measured with another one.
        """
        scheduler = getattr(pipeline, "scheduler", None)
        if scheduler is None or not hasattr(scheduler, "set_timesteps"):
            return
        if owner_of(scheduler) is not self:
            for engine in self.engines:
                self.method.check_model(facts_of(engine.model, scheduler))
            for old in self.schedulers:
                untap(old, self)
            tap_scheduler(scheduler, self)
            self.schedulers = [scheduler]

    def detach(self) -> None:
        """Leave everything as it was found; detaching twice does nothing."""
        self.reset()
        self._runs.clear()
        for engine in self.engines:
            unlisten(engine.model)
            engine.detach()
        self.engines = []
        for scheduler in self.schedulers:
            untap(scheduler, self)
        self.schedulers = []
        target = self.target()
        if target is not None:
            untap(target, self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=5)

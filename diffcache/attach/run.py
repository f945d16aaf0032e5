"""The clock: runs, steps and guidance branches, learned from the calls of the pipeline.

A run starts at the pipeline's call or at `set_timesteps` of its scheduler, a step where the
scheduler stepped since the last call of the denoiser, a branch with every further call in a step.
Without a scheduler a step starts where the timestep changes, or its number where that is said, and
a run where either turns back, or where the sample is no next step of the one before; where that may
be wrong, the timeline is in doubt, and everything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from diffcache.attach.cache_context import Context
from diffcache.attach.record import RunRecord
from diffcache.errors import AttachError
from diffcache.foreign import planned_steps, storage_of
from diffcache.step import Step

LONG = 4  # times the longest step so far: a longer one may be another run's
SURE = 2  # samples in a row that go on from the one before, after which a turn ends a doubt


@dataclass(eq=False)
class Branch:
    """One guidance branch of one denoiser in one run."""

    number: int  # number of the branch, from 0 in the order of the first calls
    name: str | None  # name that the pipeline or the user gave it, None for none
    conditions: dict[Any, Any]  # arguments by which its calls are known
    steady: frozenset[Any] | None = None  # names of those that its second call was given again; None before it
    signature: Any = None  # look of its last call
    seen_at: int = -1  # index of the step of its last call
    glance: Tensor | None = None  # a glance at the sample of its last call, where only samples tell runs apart
    has_moved: bool = False  # whether that sample was ever another than the one before
    samples: list[Tensor] = field(default_factory=list)  # glances at the first item of the samples of its last steps
    stray: float | None = None  # the most of a sample so far that no sum of steps before it makes; None for no step
    # data that extensions keep of the branch, until the run ends
    storage: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class RunStream:
    """Runs that share storage: chunks of a video, turns of a conversation.

    One that the user did not open ends with the pipeline's call, or with the run.
    """

    is_told: bool = False  # whether the user opened it with `diffcache.stream`
    chunk: int = -1  # number of the last run in it, from 0; -1 before the first
    storage: dict[Any, Any] = field(default_factory=dict)  # data that extensions keep of the stream, until it ends

    def drop(self) -> None:
        """Drop the storage of extensions, and start at the first chunk."""
        self.storage.clear()
        self.chunk = -1


class Run:
    """One sampling run: the scheduler's timesteps, and a timeline for every denoiser.

    Attributes:
        stream: The stream that it is a part of.
        storage: Data that extensions keep of the run, until it ends, `set_timesteps` starts it anew
            or its timestep turns back.
        left_out: Steps that an extension plans not to compute.
        starts: Most first steps that one of its denoisers began, since the run was said to begin.
        is_counted: Whether the stream counts it as a chunk.
        sigmas: Noise level at every step of flow matching, none where the user did not say them.
        times: Timesteps of the scheduler, None when it was not seen to set them.
        caller: Pipeline whose call it is, None outside of one.
    """

    def __init__(
        self,
        in_pipeline: bool = False,
        is_told: bool = False,
        steps: int | None = None,
        stream: RunStream | None = None,
    ) -> None:
        self.in_pipeline, self.is_told, self.steps = in_pipeline, is_told, steps
        self.sigmas: Sequence[float] = ()
        self.caller: Any = None
        self.stream = RunStream() if stream is None else stream
        self.record = RunRecord()
        self.timelines: dict[Any, Timeline] = {}
        self.epoch = 0
        self.storage: dict[Any, Any] = {}
        self.left_out: set[int] = set()
        self.starts = 0
        self.is_counted = False
        self._clear()
        if in_pipeline or is_told:
            self._count()

    @property
    def is_said(self) -> bool:
        """Return whether begin and end of the run, or of its stream, are told and not guessed."""
        return self.in_pipeline or self.is_told or self.stream.is_told

    def _clear(self) -> None:
        self.ticks = 0
        self.begin = 0
        self.times: Sized | None = None
        self.scheduled = False
        self.by_timestep = False

    def restart(self, times: Sized | None) -> None:
        """Start anew at `set_timesteps`, whose scheduler has the timesteps `times`."""
        self.drop()
        self._end_own_stream()
        self.scheduled = True
        self.times = times
        self.epoch += 1
        if self.starts:
            self.is_counted = False
        self.starts = 0
        self._count()

    def start(self, timeline: Timeline) -> None:
        """Note a first step of a denoiser; where nobody tells runs, a second one starts anew."""
        timeline.starts += 1
        if timeline.starts > self.starts:
            if self.starts and not (self.in_pipeline or self.is_told or self.scheduled):
                self.storage.clear()
                self.left_out.clear()
                self._end_own_stream()
                self.is_counted = False
            self.starts = timeline.starts
        self._count()

    def seek(self, timestep: Any) -> None:
        """Begin where the first timestep, a view of those of the scheduler, stands among them.

        Not every scheduler can be told its `begin_index`, and not every pipeline tells it. Times that a pipeline
        leaves out at their end (`denoising_end`) are none of the run's.
        """
        if not isinstance(self.times, Tensor):
            return
        if not self.begin and isinstance(timestep, Tensor) and storage_of(timestep) == storage_of(self.times):
            ahead = timestep.storage_offset() - self.times.storage_offset()
            self.begin = min(max(ahead // (self.times.stride(0) or 1), 0), len(self.times) - 1)
        count = planned_steps(self.caller) if self.epoch == 1 else None  # a pipeline of several runs may say it once
        self.times = self.times if count is None else self.times[: self.begin + count]

    def _count(self) -> None:
        """Count the run as a chunk of the stream, once for all who say that it begins."""
        if not self.is_counted or self.stream.chunk < 0:
            self.stream.chunk += 1
        self.is_counted = True

    def _end_own_stream(self) -> None:
        """End a stream that nobody opened, where one run follows another in a loop."""
        if not self.is_said:
            self.stream.drop()

    def timeline(self, denoiser: Any) -> Timeline:
        """Return the timeline of a denoiser."""
        timeline = self.timelines.get(denoiser)
        if timeline is None:
            timeline = self.timelines[denoiser] = Timeline(self)
            timeline.starts = max(self.starts - 1, 0)  # with those before it
        return timeline

    def drop(self) -> None:
        """Forget every feature and the place in the run."""
        self._clear()
        self.storage.clear()
        self.left_out.clear()
        self.timelines = {}

    @property
    def total(self) -> int | None:
        """Number of steps the user said or the scheduler will take, None when nobody said it."""
        if self.steps is not None:
            return self.steps
        return None if self.times is None else len(self.times) - self.begin


class Timeline:
    """Place of one denoiser in a run, and its guidance branches.

    A denoiser counts its own steps: of two that share a run, the second starts at 0.

    Attributes:
        ranks: Process group that shares the sample, None where one process has all of it.
        starts: Number of first steps that the denoiser began.
        storage: Data that extensions keep of the denoiser, until the run ends.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.starts = 0
        self.clear()

    def clear(self) -> None:
        """Forget every feature and start before the first step."""
        self.branches: list[Branch] = []
        self.index = -1
        self.mark: Any = None
        self.calls = 0
        self.timestep: float | None = None
        self.at: float | None = None
        self.direction = 0
        self.started_at = 0
        self.ranks: Any = None
        self.storage: dict[Any, Any] = {}
        self.doubt = ""  # why nothing tells which run or branch the calls belong to
        self.stride = 0.0  # the longest step so far, in units of the timestep
        # where the run before turned back, from which it may still go on, and its direction
        self.paused: tuple[float, int] | None = None
        self.was_broken = False  # whether the run started at a sample of another trajectory
        self.glance: Tensor | None = None  # at the sample of the last step
        self.outputs: list[tuple[int, Tensor]] = []  # step and glance of what last calls returned
        self.moving: set[str] = set()  # paths of the arguments that are samples besides the first
        self.steady = 0  # steps in a row whose sample went on from the one before
        # the glance of a skipped step, from which the timestep turned back by no more than a step
        self.left: Tensor | None = None

    def restart(self) -> None:
        """Start a run at the current call; which way its timestep goes stays known."""
        place = self.mark, self.timestep, self.at, self.direction, self.stride, self.paused
        self.clear()
        self.mark, self.timestep, self.at, self.direction, self.stride, self.paused = place
        self.index, self.calls, self.started_at = 0, 1, self.run.ticks
        self.was_broken = True

    @property
    def is_guessed(self) -> bool:
        """Return whether nothing but timesteps or numbers of steps say which run a call is of."""
        by_number = self.mark[1] == "context" and not self.run.scheduled
        return not self.run.is_told and (by_number or self.mark[1] == "timestep")

    def arrive(self, context: Context | None, timestep: Any) -> bool:
        """Note a call of the denoiser; return whether it starts a step."""
        run = self.run
        if context is not None and context.step_index is not None:
            mark: Any = (run.epoch, "context", context.step_index)
            if self.mark is not None and self.mark[:2] == mark[:2] and mark[2] < self.mark[2]:
                self._begin_anew()
        elif run.scheduled and not self._leaves_scheduler(timestep):
            mark = (run.epoch, "scheduler", run.ticks)
        else:
            value = clock_value(timestep)
            if value is None:
                raise AttachError(
                    "the call has no timestep to tell its steps by; wrap the pipeline, whose "
                    "scheduler tells them, instead of the bare model"
                )
            self._turn(value)
            mark = (run.epoch, "timestep", value)
        if mark == self.mark:
            self.calls += 1
            return False
        if self.index < 0:
            self.started_at = run.ticks
        self.mark = mark
        self.index += 1
        self.calls = 1
        if mark[1] == "timestep":
            self.timestep, self.at = timestep_value(timestep), mark[2]
        else:
            if self.index == 0 and not run.ticks:
                run.seek(timestep)
            self.timestep = cheap_value(timestep)
            self.at = None if run.ticks else clock_value(timestep)
        return True

    def _leaves_scheduler(self, timestep: Any) -> bool:
        """Return whether the scheduler does not tell the steps of this run.

        Some pipelines step copies of their scheduler. If the timestep changes before the
        scheduler ever stepped, the timestep is the clock.
        """
        run = self.run
        if run.by_timestep:
            return True
        if run.ticks or self.index < 0:
            return False
        value = clock_value(timestep)
        if self.at is None:
            self.at = value
        if value != self.at:
            run.by_timestep = True
        return run.by_timestep

    def _turn(self, value: float) -> None:
        """Start a new run where the timestep turns back; doubt steps that may be of another run."""
        if self.at is None or value == self.at:
            return
        direction = 1 if value > self.at else -1
        if self.direction and direction != self.direction:
            self._turn_back(value)
            return
        self.direction = direction
        if self.run.in_pipeline:
            return
        stride = abs(value - self.at)
        stop, before = self.paused or (value, direction)
        if before == direction and (value - stop) * direction > 0:
            self.doubt = self.doubt or "runs in turns"
        elif self.stride and stride > LONG * self.stride and not self.run.is_told:
            self.doubt = self.doubt or "long step"
        self.stride = max(self.stride, stride)

    def _turn_back(self, value: float) -> None:
        """Start a new run where the timestep turned back, from which the one before may go on."""
        calls, at = self.run.record.calls, self.at or 0.0
        paused = at, self.direction
        was_skipped = bool(calls) and calls[-1].computed is False
        left = self.glance if was_skipped and abs(value - at) <= 1.5 * self.stride else None
        self._begin_anew()
        self.paused, self.left = paused, left

    def _begin_anew(self) -> None:
        """Start a new run, in doubt still where runs may go on taking turns."""
        is_over = self.steady >= SURE or self.doubt == "long step"  # which is over with the turn
        doubt, seen, steady = self.doubt, self.glance, self.steady
        self.clear()
        if doubt and not is_over:
            self.doubt, self.glance, self.steady = doubt, seen, steady

    @property
    def total(self) -> int | None:
        """Number of steps this denoiser has if no other takes over, None when unknown."""
        total = self.run.total
        return None if total is None else total - self.started_at

    def aside(self, timestep: Any) -> Step:
        """Return the step of a call that belongs to none, with the index of the last."""
        chunk = max(self.run.stream.chunk, 0)
        return Step(max(self.index, 0), cheap_value(timestep), self.total, 0, chunk, self.ranks)

    def step(self, branch: int) -> Step:
        """Return the current step for a method."""
        run = self.run
        total = None if run.steps is None and run.times is None else self.total
        chunk, left_out = max(run.stream.chunk, 0), self.index in run.left_out
        return Step(self.index, self.timestep, total, branch, chunk, self.ranks, None, left_out, self.started_at)

    def add(self, name: str | None, conditions: dict[Any, Any]) -> Branch:
        """Return a new branch; one of no name that has missed a step is forgotten."""
        kept = [b for b in self.branches if b.name is not None or b.seen_at >= self.index - 1]
        branch = Branch(max((b.number for b in kept), default=-1) + 1, name, conditions)
        self.branches = [*kept, branch]
        return branch

    def count(self) -> bool:
        """Note a call that is a step of its own, and a run of its own where nobody told one.

        So is every call of a network without a timestep, such as a language model. It always starts
        a step.
        """
        run = self.run
        if not (run.is_told or run.in_pipeline):
            self.clear()
        self.index += 1
        self.calls = 1
        self.mark = (run.epoch, "call", self.index)
        return True

    def only_branch(self) -> Branch:
        """Return the one guidance branch of a network whose every call is a step."""
        if not self.branches:
            self.branches = [Branch(0, None, {})]
        self.branches[0].seen_at = self.index
        return self.branches[0]

    def branch_of(
        self, context: Context | None, signature: Any, conditions: Callable[[], dict[Any, Tensor]]
    ) -> Branch:
        """Return the branch a pipeline's call belongs to, a new one when none fits.

        The pipeline's own name for the branch decides; then which branch was given the very same
        condition tensors; then the order of the calls, which a pipeline keeps. Where condition
        tensors that a branch was given again and again are others, as where guidance sets in or
        ends or a callback changes the prompt, the branch starts anew.
        """
        index = self.index
        name = context.name if context is not None else None
        free, alike = [], []
        for known in self.branches:
            if known.seen_at != index and known.name == name:
                free.append(known)
                if known.signature == signature:
                    alike.append(known)
        alike = alike or free
        if not alike:
            branch = Branch(len(self.branches), name, conditions())
            self.branches.append(branch)
        else:
            given = conditions()
            branch = max(alike, key=lambda b: (len(_shared(b.conditions, given)), -b.number))
            if branch.signature == signature:
                _check_steady(branch, given)
            else:  # of another look, so that this call is computed
                branch.conditions, branch.steady = given, None
        branch.seen_at = index
        return branch


def _check_steady(branch: Branch, given: dict[Any, Tensor]) -> None:
    """Start a branch anew if tensors that its calls were given so far are others now."""
    shared = _shared(branch.conditions, given)
    if branch.steady is None:
        branch.steady = shared
    elif not branch.steady <= shared:
        branch.conditions, branch.steady, branch.signature = given, None, None
        branch.storage.clear()


def _shared(held: dict[Any, Tensor], given: dict[Any, Tensor]) -> frozenset[Any]:
    """Return the names of the condition tensors that are the same memory."""
    return frozenset(
        name for name, tensor in given.items() if name in held and held[name].data_ptr() == tensor.data_ptr()
    )


def timestep_value(timestep: Any) -> float | None:
    """Return a timestep as a number; waits for the device; the largest of several."""
    if isinstance(timestep, Tensor):
        if timestep.numel() > 1:
            timestep = timestep.max()
        return float(timestep.item()) if timestep.numel() else None
    if isinstance(timestep, (list, tuple)):
        return timestep_value(timestep[0]) if timestep else None
    return None if timestep is None else float(timestep)


def clock_value(timestep: Any) -> float | None:
    """Return a number that changes whenever a timestep does; waits for the device.

    The mean of several: where every frame or token has its own, they need not all move.
    """
    if isinstance(timestep, Tensor):
        return float(timestep.detach().cpu().double().mean()) if timestep.numel() else None
    if isinstance(timestep, (list, tuple)):
        values = [value for value in map(clock_value, timestep) if value is not None]
        return sum(values) / len(values) if values else None
    return None if timestep is None else float(timestep)


def cheap_value(timestep: Any) -> float | None:
    """Return a timestep as a number if no device has to be waited for, else None."""
    if isinstance(timestep, Tensor) and timestep.device.type != "cpu":
        return None
    return timestep_value(timestep)

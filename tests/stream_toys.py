"""An ability that keeps things for every lifetime, and loops of a few chunks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

import diffcache
from diffcache import Ability, Call, Extension, Method
from tests.bare.toys import EVERY, PLAIN, Toy, noise, track


class Thing:
    """Something that an extension keeps."""


@dataclass
class Note:
    """Note of what a call saw: its step, and what was kept before it."""

    chunk: int
    index: int
    timestep: float | None
    writes: bool
    in_stream: int  # calls that the stream's storage has seen, and so on
    in_run: int
    in_call: int


@dataclass(frozen=True)
class Keep(Ability):
    """Count calls in the storage of every lifetime."""

    extension = "tests.stream_toys:install"
    notes: list[Note] = field(default_factory=list, repr=False)
    things: list[Any] = field(default_factory=list, repr=False)  # weak references


class Keeper(Extension):
    def __init__(self, ability: Keep) -> None:
        self.ability = ability

    def open(self, call: Call) -> Call:
        kept = [call.run.stream.storage, call.run.storage, call.storage]
        counts = [len(storage.setdefault(self, [])) for storage in kept]
        self.ability.notes.append(Note(call.step.chunk, call.step.index, call.step.timestep, call.writes, *counts))
        for storage in kept:
            thing = Thing()
            storage[self].append(thing)
            self.ability.things.append(weakref.ref(thing))
        return call


def install(denoiser: Any, ability: Any) -> Keeper:
    return Keeper(ability)


@dataclass(frozen=True)
class Kept(Method):
    """The abilities of another method and those counts."""

    inner: Method = EVERY
    keep: Keep = field(default_factory=Keep)

    def abilities(self) -> tuple[Ability, ...]:
        return (*self.inner.abilities(), self.keep)

    def chunks(self, writes: bool = False) -> list[int]:
        return [note.chunk for note in self.keep.notes if note.writes is writes]

    @property
    def alive(self) -> int:
        return sum(thing() is not None for thing in self.keep.things)


class Pipe:
    """A pipeline of a toy, which makes a video chunk by chunk, as causal ones do."""

    def __init__(self) -> None:
        self.transformer = Toy()
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    def chunk(self, number: int, writes: bool = True, steps: int = 4) -> Tensor:
        self.scheduler.set_timesteps(steps)
        x = noise(number)
        for t in self.scheduler.timesteps:
            x = self.scheduler.step(self.transformer(x, t), t, x)[0]
        if writes:
            with diffcache.writing():
                assert torch.equal(self.transformer(x, torch.tensor(0.0)), PLAIN(x, 0.0))
        return x

    def __call__(self, chunks: int = 3, writes: bool = True, **_: Any) -> list[Tensor]:
        return [self.chunk(number, writes) for number in range(chunks)]


Loop = Callable[[Any, int, bool], Any]


def in_pipeline(pipe: Pipe, chunks: int, writes: bool) -> Any:
    return pipe(chunks, writes)


def by_scheduler(pipe: Pipe, chunks: int, writes: bool) -> Any:
    return [pipe.chunk(number, writes) for number in range(chunks)]


def in_calls(pipe: Pipe, chunks: int, writes: bool) -> Any:
    return [pipe(1, writes) for _ in range(chunks)]


def bare(model: Any, chunks: int, writes: bool, told: bool = False) -> Any:
    outs = []
    for number in range(chunks):
        calls = track(number, steps=4)
        if told:
            with diffcache.run(model, steps=4):
                outs += [model(*call) for call in calls]
        else:
            outs += [model(*call) for call in calls]
        if writes:
            with diffcache.writing():
                assert torch.equal(model(calls[-1][0], 0.0), PLAIN(calls[-1][0], 0.0))
    return outs


def bare_told(model: Any, chunks: int, writes: bool) -> Any:
    return bare(model, chunks, writes, told=True)


LOOPS = [in_pipeline, by_scheduler, in_calls, bare, bare_told]


def target_of(loop: Loop) -> Any:
    return Toy() if loop in (bare, bare_told) else Pipe()


def write(model: Any, *args: Any) -> Tensor:
    with diffcache.writing():
        out: Tensor = model(*args)
    return out

"""Streams, which outlast runs: what is kept of them, and when it goes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from diffcache import AttachError, Call
from diffcache.api import handle_of
from tests.bare.toys import EVERY, PLAIN, Toy, noise, track
from tests.internals import marks
from tests.stream_toys import (
    LOOPS,
    Kept,
    Loop,
    Pipe,
    bare,
    bare_told,
    by_scheduler,
    in_calls,
    in_pipeline,
    target_of,
    write,
)

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("writes", [False, True], ids=["", "writing"])
@pytest.mark.parametrize("loop", LOOPS)
def test_runs_share_the_storage_of_their_stream(loop: Loop, writes: bool) -> None:
    method = Kept()
    target = diffcache.wrap(target_of(loop), method)
    with diffcache.stream(target) as stream:
        assert stream.chunk == -1
        loop(target, 3, writes)
        assert stream.chunk == 2
        notes = method.keep.notes
        assert method.chunks() == [0] * 4 + [1] * 4 + [2] * 4
        assert method.chunks(writes=True) == [0, 1, 2] * writes
        assert [note.index for note in notes if not note.writes] == [0, 1, 2, 3] * 3
        assert [note.in_stream for note in notes] == list(range(len(notes)))
        assert [note.in_run for note in notes if not note.writes] == [0, 1, 2, 3] * 3
        assert {note.in_call for note in notes} == {0}
        assert method.alive >= len(notes)
    assert method.alive == 0 and handle_of(target).held_bytes() == 0
    assert not stream.is_told and stream.chunk == -1
    with diffcache.stream(target):  # another one starts at its beginning
        loop(target, 1, writes)
    assert {note.chunk for note in notes[-4:]} == {0} and notes[-4].in_stream <= 1
    assert method.alive == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stream_that_nobody_opens_ends_with_the_run(loop: Loop) -> None:
    method = Kept()
    target = diffcache.wrap(target_of(loop), method)
    loop(target, 3, False)
    first = [note for note in method.keep.notes if note.index == 0]
    if loop is in_pipeline:  # whose chunks are in one call
        assert [note.chunk for note in first] == [0, 1, 2]
        assert [note.in_stream for note in first] == [0, 4, 8]
    else:
        assert [note.chunk for note in first] == [0, 0, 0]
        assert [note.in_stream for note in first] == [0, 0, 0]
    if loop not in (bare, by_scheduler):
        assert method.alive == 0
    diffcache.reset(target)
    assert method.alive == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_the_report_is_that_of_the_last_run(loop: Loop) -> None:
    target = diffcache.wrap(target_of(loop), EVERY)
    with diffcache.stream(target):
        loop(target, 2, True)
    report = diffcache.report(target)
    assert report.finished or loop in (in_pipeline, in_calls)
    assert report.steps_skipped >= 2 and report.flops_saved is not None
    assert not any(call.writes and not call.computed for call in report.calls)
    assert "CssC" in marks(target)


def test_reset_forgets_all_and_the_stream_goes_on() -> None:
    method = Kept()
    pipe = diffcache.wrap(Pipe(), method)
    with diffcache.stream(pipe):
        pipe.chunk(0)
        pipe.chunk(1)
        assert method.alive > 0
        diffcache.reset(pipe)
        assert method.alive == 0
        seen = len(method.keep.notes)
        pipe.chunk(2)
        pipe.chunk(3)
    later = method.keep.notes[seen:]
    assert [note.chunk for note in later] == [0] * 5 + [1] * 5
    assert later[0].in_stream == later[0].in_run == 0


class Failing:
    """Makes the next call of a model fail."""

    def __init__(self, model: nn.Module, error: BaseException) -> None:
        def fail(*_: Any) -> None:
            raise error

        self.hook = model.get_submodule("blocks.2").register_forward_pre_hook(fail)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("told", [False, True])
def test_an_exception_in_an_ordinary_call_keeps_the_stream(error: Any, told: bool) -> None:
    method = Kept()
    model = diffcache.wrap(Toy(), method)
    calls = track(0)
    with diffcache.stream(model) as stream:
        bare(model, 1, True, told)
        with Failing(model, error), pytest.raises(type(error)):
            model(*calls[0])
        before = len(method.keep.notes)
        bare(model, 1, True, told)
        later = method.keep.notes[before:]
        assert later[0].in_run == 0 and later[0].in_stream == before
        assert stream.chunk > 0 and not later[0].writes
    assert method.alive == 0


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["bare", "told", "scheduler", "pipeline", "in a pipeline"])
def test_an_exception_in_a_writing_call_drops_the_stream(error: Any, place: str) -> None:
    method = Kept()
    is_bare = place in ("bare", "told")
    target: Any = diffcache.wrap(Toy() if is_bare else Pipe(), method)
    model = target if is_bare else target.transformer
    again: dict[str, Loop] = {
        "bare": bare, "told": bare_told, "scheduler": by_scheduler, "pipeline": in_calls,
        "in a pipeline": in_pipeline,
    }  # fmt: skip
    with diffcache.stream(target) as stream:
        again[place](target, 2, True)
        if place == "in a pipeline":

            class Once(Pipe):
                def __call__(self, chunks: int = 1, writes: bool = True) -> Any:
                    self.chunk(0, writes=False)
                    with Failing(self.transformer, error), diffcache.writing():
                        self.transformer(noise(0), torch.tensor(0.0))

            other = diffcache.unwrap(target)
            assert not stream.storage  # which unwrapping ended
            other.__class__ = Once
            diffcache.wrap(other, method)
            with diffcache.stream(other) as stream:
                stream.storage["mine"] = 1
                with pytest.raises(type(error)):
                    other()
                assert not stream.storage and stream.chunk == -1
            return
        with Failing(model, error), diffcache.writing(), pytest.raises(type(error)):
            model(noise(0), torch.tensor(0.0))
        if isinstance(error, ValueError):
            assert not stream.storage
        before = len(method.keep.notes)
        again[place](target, 2, True)
        later = method.keep.notes[before:]
        assert later[0].in_stream == later[0].in_run == 0  # the interrupt is noticed here at last
        assert [note.chunk for note in later] == [0] * 5 + [1] * 5
    assert method.alive == 0


def test_a_call_that_is_refused_before_it_writes_drops_the_stream() -> None:
    model = diffcache.wrap(Toy(), EVERY)

    def refuse(call: Call) -> Call:
        raise AttachError("not this one")

    with diffcache.stream(model) as stream:
        (extension,) = handle_of(model).denoisers[0].extensions
        model(*track(0)[0])
        for writes in (False, True):
            stream.storage["mine"] = 1
            extension.open = refuse  # type: ignore[method-assign]
            with pytest.raises(AttachError, match="not this one"):
                write(model, noise(0), 0.0) if writes else model(*track(0)[1])
            assert stream.storage == ({} if writes else {"mine": 1})
            del extension.open
        assert torch.equal(model(*track(0)[0]), PLAIN(*track(0)[0]))


def test_an_interrupted_run_goes_on_with_its_scheduler() -> None:
    pipe = diffcache.wrap(Pipe(), EVERY)
    own = pipe.chunk(1)
    interrupt = KeyboardInterrupt()
    with Failing(pipe.transformer, interrupt), pytest.raises(KeyboardInterrupt):
        pipe.chunk(0)
    pipe.scheduler.set_timesteps(4)
    run = handle_of(pipe).run()
    assert run.total == 4
    x = noise(1)
    for t in pipe.scheduler.timesteps:
        x = pipe.scheduler.step(pipe.transformer(x, t), t, x)[0]
        assert run.scheduled or run.ticks == 0
    assert torch.equal(x, own) and marks(pipe) == "CssC"


def test_streams_that_do_not_fit_are_errors() -> None:
    model = Toy()
    diffcache.wrap(model, EVERY)
    with diffcache.stream(model):
        with pytest.raises(AttachError, match=r"diffcache\.stream of this model is open"):
            diffcache.stream(model).__enter__()
        with (
            diffcache.run(model),
            pytest.raises(AttachError, match=r"diffcache\.stream of this model is open"),
        ):
            diffcache.stream(model).__enter__()
    with (
        diffcache.run(model),
        pytest.raises(AttachError, match="a stream is made of runs"),
    ):
        diffcache.stream(model).__enter__()
    with diffcache.stream(model):
        pass


def test_streams_of_threads_do_not_meet() -> None:
    method = Kept()
    model = diffcache.wrap(Toy(), method)
    own = bare(diffcache.wrap(Toy(), EVERY), 2, False)
    turn, failures = threading.Barrier(2, timeout=20), list[BaseException]()
    seen: dict[int, list[Any]] = {0: [], 1: []}

    def job(number: int) -> None:
        try:
            with torch.no_grad(), diffcache.stream(model) as stream:
                for place, call in enumerate(track(0, steps=4) + track(1, steps=4)):
                    turn.wait()
                    assert torch.equal(model(*call), own[place])
                    if place in (1, 3) and number == 0:
                        with diffcache.writing():
                            model(*call)
                    (kept,) = stream.storage.values()
                    seen[number].append((len(kept), stream.chunk))
                turn.wait()
        except BaseException as error:
            failures.append(error)
            turn.abort()

    threads = [threading.Thread(target=job, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    chunks = [0] * 4 + [1] * 4
    assert seen[0] == list(zip([1, 3, 4, 6, 7, 8, 9, 10], chunks, strict=True))
    assert seen[1] == list(zip(range(1, 9), chunks, strict=True))
    assert method.alive == 0

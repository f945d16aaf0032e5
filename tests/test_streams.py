"""Streams, which outlast runs: what is kept of them, when it goes, and calls that write to them."""

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import diffcache
from diffcache import Ability, AttachError, Call, Extension, Interval, Method
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method
from diffcache.features.serialize import to_plain
from diffcache.features.tables import Tables
from diffcache.registry import rows_of
from diffcache.targets import handle_of
from tests.bare.toys import COND, EVERY, PLAIN, Toy, alone, noise, track
from tests.features import region_pipelines
from tests.internals import marks
from tests.test_families import FEWER as PIPE_STEPS
from tests.test_families import ready
from tests.zoo.case import output_tensors
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes
from tests.zoo_runs import in_threads


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

    extension = "tests.test_streams:install"
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
        "bare": bare,
        "told": bare_told,
        "scheduler": by_scheduler,
        "pipeline": in_calls,
        "in a pipeline": in_pipeline,
    }
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


def test_streams_of_threads_do_not_meet() -> None:
    method = Kept()
    model = diffcache.wrap(Toy(), method)
    own = bare(diffcache.wrap(Toy(), EVERY), 2, False)
    turn = threading.Barrier(2, timeout=20)

    def job(number: int) -> list[tuple[int, int]]:
        seen = []
        with diffcache.stream(model) as stream:
            for place, call in enumerate(track(0, steps=4) + track(1, steps=4)):
                turn.wait()
                assert torch.equal(model(*call), own[place])
                if place in (1, 3) and number == 0:
                    write(model, *call)
                (kept,) = stream.storage.values()
                seen.append((len(kept), stream.chunk))
            turn.wait()
        return seen

    seen, chunks = in_threads(partial(job, 0), partial(job, 1)), [0] * 4 + [1] * 4
    assert seen[0] == list(zip([1, 3, 4, 6, 7, 8, 9, 10], chunks, strict=True))
    assert seen[1] == list(zip(range(1, 9), chunks, strict=True))
    assert method.alive == 0


FLUX = "FluxPipeline"
NOTED = "writes to a stream"


def test_a_causal_loop_skips_as_if_the_clean_pass_were_not_there() -> None:
    def loop(model: Any, writes: bool) -> list[Tensor]:
        outs = []
        for chunk in range(3):
            calls = track(chunk, steps=4)
            outs += [model(*call) for call in calls]
            clean = calls[-1][0] + 1
            if writes:
                with diffcache.writing():
                    assert torch.equal(model(clean, 0.0), PLAIN(clean, 0.0))
        return outs

    plain, model = Toy(), Toy()
    diffcache.wrap(plain, "interval", every=3)
    diffcache.wrap(model, "interval", every=3)
    handle = handle_of(model)
    assert all(map(torch.equal, loop(model, True), loop(plain, False)))
    calls = handle.last.calls
    assert [call.computed for call in calls] == [True, False, False, True, True]
    assert [call.reason for call in calls][-1] == NOTED
    report = diffcache.report(model)
    assert (report.steps_computed, report.steps_skipped) == (2, 2)
    assert report.flops_saved == diffcache.report(plain).flops_saved
    assert f"1 call was computed: {NOTED}" not in str(report)
    assert report.timeline_image().size == (800, 200)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    "more",
    [dict(site=site) for site in ("stack", "block", "module", "model", "attention")]
    + [dict(site="stack", hold="int8"), dict(site="module", hold="host")],
)
def test_a_run_may_begin_with_a_call_that_writes(told: bool, more: dict[str, str]) -> None:
    settings = {"every": 3, **more}
    model, other = (diffcache.wrap(Toy(), "interval", **settings) for _ in range(2))
    calls = track(0)
    own = [other(*call) for call in calls]

    def loop() -> None:
        assert torch.equal(write(model, calls[0][0], 7.0), PLAIN(calls[0][0], 7.0))
        assert diffcache.report(model).steps_computed == 0 and str(diffcache.report(model))
        for place, call in enumerate(calls):
            assert torch.equal(model(*call), own[place])
            clean = noise(50 + place)
            for _ in range(2):  # with another timestep and a condition, given in their places
                assert torch.equal(write(model, clean, 99.0, COND[1]), PLAIN(clean, 99.0, COND[1]))

    if told:
        with diffcache.run(model, steps=len(calls)):
            loop()
    else:
        loop()
    steps = [call for call in handle_of(model).last.calls if not call.writes]
    assert "".join("sC"[bool(call.computed)] for call in steps) == marks(other)


def test_a_call_that_writes_knows_where_it_is() -> None:
    method = Kept()
    pipe = diffcache.wrap(Pipe(), method)
    pipe.scheduler.set_timesteps(4)
    x, times = noise(0), pipe.scheduler.timesteps
    write(pipe.transformer, x, torch.tensor(5.0))
    for t in times:
        x = pipe.scheduler.step(pipe.transformer(x, t), t, x)[0]
        write(pipe.transformer, x, torch.tensor(6.0))
    written = [note for note in method.keep.notes if note.writes]
    assert [note.index for note in written] == [0, 0, 1, 2, 0]  # the run ends with its last step
    assert [note.timestep for note in written] == [5.0] + [6.0] * 4
    steps = [note for note in method.keep.notes if not note.writes]
    assert [note.index for note in steps] == [0, 1, 2, 3]
    assert [note.timestep for note in steps] == times.tolist()


def test_a_name_and_a_call_that_writes_go_together() -> None:
    model = diffcache.wrap(Toy(), EVERY)
    for call in track(0):
        with diffcache.branch("one"):
            model(*call)
            assert torch.equal(write(model, *call), PLAIN(*call))
        with diffcache.writing(), diffcache.branch("one"):
            assert torch.equal(model(*call), PLAIN(*call))
    calls = [call for call in handle_of(model).last.calls if not call.writes]
    assert [call.computed for call in calls] == [True, False, False] * 2


def test_a_call_that_writes_with_gradients_on_leaves_the_run_alone() -> None:
    model, own = diffcache.wrap(Toy(), EVERY), alone(track(0))
    for place, call in enumerate(track(0)):
        assert torch.equal(model(*call), own[place])
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)
            assert write(model, *call).requires_grad


def test_a_pipeline_inside_writing_is_computed() -> None:
    pipe = Pipe()
    plain = pipe(1, writes=False)
    diffcache.wrap(pipe, EVERY)
    with diffcache.writing():
        assert all(map(torch.equal, pipe(1, writes=False), plain))
    assert {call.reason for call in handle_of(pipe).last.calls} == {NOTED}


class Writes:
    """Lets every call of a model be followed by one that writes.

    Attributes:
        pairs: What those were given, and what they returned.
    """

    def __init__(self, model: nn.Module, sample: str = "hidden_states") -> None:
        self.model, self.sample, self.inside = model, sample, False
        self.first: dict[str, Any] = {}  # what a method that leaves tokens out gave at first
        self.pairs: list[tuple[Any, Any, list[Tensor]]] = []
        self.hook = model.register_forward_hook(self.follow, with_kwargs=True)

    def follow(self, model: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.inside:
            return
        self.inside = True
        self.first = self.first or kwargs
        other = (1 + 0.1 * len(self.pairs)) * self.first[self.sample].flip(0, -1)
        given = {**self.first, "timestep": 0.7 * kwargs["timestep"], self.sample: other}
        try:
            with diffcache.writing():
                out = self.model(*args, **given)
        finally:
            self.inside = False
        self.pairs.append((args, given, [t.clone() for t in output_tensors(out)]))

    def check(self, known: dict[Any, list[Tensor]]) -> int:
        """Compare with the model, which is not wrapped any more, or with what is known of it; return how many there were."""
        for args, kwargs, outs in self.pairs:
            key = tuple(x.numpy().tobytes() if isinstance(x, Tensor) else repr(x) for x in (*args, *kwargs.values()))
            if key not in known:
                known[key] = output_tensors(self.model(*args, **kwargs))
            assert all(map(torch.equal, known[key], outs))
        return len(self.pairs)

    def __enter__(self) -> "Writes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()


def told_of(calls: Any) -> list[Any]:
    return [(c.denoiser, c.index, c.branch, c.computed, c.counts, c.flops) for c in calls if not c.writes]


@cache
def unet() -> Any:
    case = cases()["UNet2DConditionModel"]
    return case, case.build(0)


@pytest.mark.parametrize("site", ["stack", "deep", "module"])
def test_a_unet_computes_a_call_that_writes(site: str) -> None:
    case, model = unet()
    given = [case.kwargs(model, 0, step=step, steps=3) for step in range(3)]
    with diffcache.wrapped(model, "interval", every=2, site=site) as handle:
        own = [model(**kwargs)[0].clone() for kwargs in given]
        assert [call.computed for call in handle.last.calls] == [True, False, True]
        handle.reset()
        with Writes(model, "sample") as writes:
            assert all(map(torch.equal, [model(**kwargs)[0] for kwargs in given], own))
    assert writes.check({}) == 3


@pytest.fixture(scope="module")
def built() -> Any:
    """Return a pipeline with its case, and what is known of its transformer alone."""
    return pipes()[FLUX], pipes()[FLUX].build(0), {}


MORE: dict[str, Any] = {
    "a quantized model": diffcache.CacheQuant(every=3, bits="w8a8", exempt="single_transformer_blocks.*"),
    "rounded tables": diffcache.TemporalTable(bits=8, keep="layer"),
    "tables of few pages": diffcache.TemporalTable(entries=PIPE_STEPS),
    "tables and a skipping method": diffcache.TemporalTable(method=Interval(every=3)),
    "a gate on the time": diffcache.TeaCache(threshold=1e9, input="time", coefficients=(1.0, 0.0)),
    "modules": make_method("taylorseer", every=4, warmup=1, site="module", hold="host"),
}


def on_method(name: str, case: Any, pipe: Any) -> Method:
    """Return a method that skips, calibrated where it has to be."""
    if name == "tuned":
        header = {
            "method": "tuned",
            "steps": PIPE_STEPS,
            "choice": to_plain(Interval(every=3), {}),
            "front": [],
            **facts_of(pipe.transformer, pipe.scheduler),
        }
        return diffcache.Tuned(tables=Tables(header, {}))
    if name == "a quantized model":
        return diffcache.calibrate(pipe, MORE[name], [case.prompt(pipe, 1, PIPE_STEPS)])
    if name in MORE:
        return MORE[name]
    with torch.enable_grad():
        return ready(name, FLUX, case, pipe)


# RegionE is for editing pipelines; FasterCache skips where guidance is a call of its own. The others
# are TaylorSeer with another forecast or list of steps, which no call that writes comes to.
SERVED_ELSEWHERE = ("regione", "fastercache", "dmd", "dpcache", "foca", "freqca", "hicache", "spectrum")


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize("name", [*(name for name in rows_of("method") if name not in SERVED_ELSEWHERE), *MORE])
def test_methods_compute_a_call_that_writes_in_a_pipeline(built: Any, name: str) -> None:
    case, pipe, known = built
    with diffcache.wrapped(pipe, on_method(name, case, pipe)) as handle:
        if "tab" in name or name in ("teacache", "seacache"):
            case.run(pipe, 0, PIPE_STEPS)  # which fills look-up tables; a gate's first call finds where it looks
        own, alone = case.run(pipe, 0, PIPE_STEPS), told_of(handle.last.calls)
        assert handle.last.skipped > 0 or name == "rounded tables"  # whose layers run
        with Writes(pipe.transformer) as writes:
            assert torch.equal(case.run(pipe, 0, PIPE_STEPS), own)
        assert told_of(handle.last.calls) == alone
        assert sum(call.writes for call in handle.last.calls) == PIPE_STEPS
    assert writes.check(known) == PIPE_STEPS


def test_regione_computes_a_call_that_writes() -> None:
    pipe = region_pipelines.kontext()
    given = region_pipelines.kontext_call

    with diffcache.wrapped(pipe, region_pipelines.method(pipe, threshold=0.9)) as handle:
        own, alone = pipe(**given()).images, told_of(handle.last.calls)
        assert handle.last.skipped > 0
        with Writes(pipe.transformer) as writes:
            assert torch.equal(pipe(**given()).images, own)
        assert told_of(handle.last.calls) == alone
    assert writes.check({}) == region_pipelines.STEPS


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize(
    "method",
    [
        diffcache.FittedForecast(computed=2),
        diffcache.ERTACache(threshold=1e9, time=False),
        diffcache.CacheQuant(every=2, bits="w8a8"),
    ],
    ids=lambda method: method.name,
)
def test_a_calibration_sees_no_call_that_writes(method: Any) -> None:
    alone, beside = (
        diffcache.calibrate(Pipe(), method, [{"chunks": 1, "writes": writes}] * 2) for writes in (False, True)
    )
    assert beside == alone

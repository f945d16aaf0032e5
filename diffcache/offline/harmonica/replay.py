"""Replays the sampling loop of a pipeline outside its call, step by step and with gradients."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffcache.anchor import owner_of
from diffcache.api import inspect as anatomies_of
from diffcache.attach.anatomy import Anatomy
from diffcache.errors import AttachError
from diffcache.offline.tracing import call_pipeline
from diffcache.step import Site
from diffcache.targets import check_free

if TYPE_CHECKING:
    from diffcache.offline.harmonica.training import Mixer


class _EnoughError(Exception):
    """Ends a pipeline's call once its inputs are recorded."""


@dataclass
class Moment:
    """One step of a recorded run."""

    calls: list[dict[str, Any]] = field(default_factory=list)  # named arguments of the denoiser's calls
    outs: list[Tensor] = field(default_factory=list)  # their samples
    time: Any = None  # the timestep the solver was given
    guided: Tensor = field(default_factory=lambda: torch.empty(0))  # the output the solver was given
    sample: Tensor = field(default_factory=lambda: torch.empty(0))  # the sample the solver was given
    # sample that the solver returned; empty where the run ended before
    after: Tensor = field(default_factory=lambda: torch.empty(0))
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the solver's step


class Recorder:
    """Watches one call of a pipeline up to its first step or, if the whole is asked for, its last.

    `solver` is a copy of the scheduler as it was before the first step.
    """

    def __init__(self, pipe: Any, model: nn.Module, whole: bool) -> None:
        self.pipe, self.model, self.whole = pipe, model, whole
        self.arguments = list(inspect.signature(type(model).forward).parameters)[1:]
        self.moments: list[Moment] = []
        self.solver: Any = None
        self._open = Moment()

    def watch(self, prompts: Sequence[Any], seed: int, call: Mapping[str, Any]) -> list[Moment]:
        """Draw one batch and return its record; raise AttachError if its scheduler took no step."""
        with self._watching(), torch.no_grad(), suppress(_EnoughError):
            call_pipeline(self.pipe, list(prompts), seed, call)
        if not self.moments:
            raise AttachError(
                f"{type(self.pipe).__name__} took no step with its scheduler, so its loop cannot be replayed"
            )
        return self.moments

    @contextmanager
    def _watching(self) -> Iterator[None]:
        solver = self.pipe.scheduler
        pre = self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        post = self.model.register_forward_hook(self._leave)
        base = solver.step
        # pipelines look at the signature of `step`, which `wraps` keeps
        solver.step = functools.wraps(base)(functools.partial(self._step, solver, base))
        try:
            yield
        finally:
            del solver.step
            pre.remove()
            post.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = dict(zip(self.arguments, args, strict=False))
        self._open.calls.append({**named, **kwargs})

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._open.outs.append(sample_of(out))

    def _step(self, solver: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
        moment, self._open = self._open, Moment()
        names = list(inspect.signature(base).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        moment.guided, moment.time, moment.sample = (given.pop(name) for name in names[:3])
        moment.options = given
        if self.solver is None:
            self.solver = copy.deepcopy(solver)
            del self.solver.__dict__["step"]
        self.moments.append(moment)
        if not self.whole:
            raise _EnoughError
        out = base(*args, **kwargs)
        moment.after = out[0]
        if len(self.moments) == len(solver.timesteps):
            raise _EnoughError
        return out


def denoiser_of(pipe: Any) -> tuple[nn.Module, Anatomy]:
    """Return the denoiser of a pipeline that has one, uncached.

    Raises:
        AttachError: If it is no pipeline, has several denoisers, or is wrapped or compiled.
    """
    if isinstance(pipe, nn.Module) or not hasattr(pipe, "scheduler"):
        raise AttachError(f"{type(pipe).__name__}: a router is trained on a pipeline, not a model")
    found = anatomies_of(pipe)
    if len(found) != 1:
        raise AttachError(
            f"{type(pipe).__name__} has {len(found)} denoisers ({', '.join(found)}); a router is trained for one"
        )
    ((name, anatomy),) = found.items()
    model: nn.Module = getattr(pipe, name)
    if owner_of(model) is not None:
        raise AttachError(f"{type(pipe).__name__} is wrapped; unwrap it before training a router")
    check_free(pipe, {name: model}, Site.MODULE)
    return model, anatomy


def sample_of(out: Any) -> Tensor:
    """Return the sample of a denoiser's output, which must be a tensor."""
    found = out if isinstance(out, Tensor) else out[0]
    if not isinstance(found, Tensor):
        raise AttachError(f"the denoiser returned {type(found).__name__}; a tensor is needed")
    return found


CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative to the largest value; other dtypes:
CLOSE_ENOUGH = 3e-2


class Replay:
    """The sampling loop of a pipeline, learned by watching it once without a cache.

    The recorded arguments of the denoiser are used again with another sample; only the sample and the timestep may
    change from step to step. The output the solver takes must be `a + scale * (b - a)` of two guidance branches (both
    in one batch, or two calls a step), or that of the one branch; the scale is measured. That all this holds is
    checked: the replayed run must end where the pipeline ended.

    Args:
        pipe: A diffusers pipeline with one denoiser, uncached, and a solver that draws no noise.
        call: Arguments of its call, such as `num_inference_steps`, without prompts; noise is that of seeds.
        prompts: One batch: texts, class numbers, or one mapping of the call's arguments; later batches have as many
            samples.

    Attributes:
        total: Number of steps T, counted in calls of the solver.
        shape: Shape of a sample, without the batch.
        scale: Measured guidance scale, None without guidance; with the branches in the order (condition, empty) it is
            1 minus the pipeline's own.

    Raises:
        AttachError: If the pipeline is wrapped, or its loop is not of this form.
    """

    def __init__(self, pipe: Any, call: Mapping[str, Any], prompts: Sequence[Any]) -> None:
        self.pipe, self.call = pipe, {k: v for k, v in call.items() if k != "generator"}
        self.model, self.anatomy = denoiser_of(pipe)
        moments, recorder = self._watch(prompts, seed=0, whole=True)
        first = moments[0]
        self.given, self.solver = recorder.arguments[0], recorder.solver
        self.total, (self.count, *self.shape) = len(moments), first.sample.shape
        self.times = [moment.time for moment in moments]
        self.options = {k: v for k, v in first.options.items() if k != "generator"}
        time = self.anatomy.timestep
        self.model_times = [[call.get(time or "") for call in moment.calls] for moment in moments]
        self._check_constant(moments)
        self.scale = _guidance_scale(moments)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            track = Track(self, first)
            for _ in moments:
                track.advance(track.predict())
        if not _close(track.sample, moments[-1].after):
            raise AttachError(
                f"{type(pipe).__name__}: the replayed run does not end where the pipeline ended; a "
                "router is trained on pipelines that only guide and step, with a solver that "
                "draws no noise (DDIM with eta=0, Euler, DPM-Solver)"
            )

    def sites(self) -> list[str]:
        """Return the paths of the modules that a router decides about, in their order."""
        found = self.anatomy.modules_at(Site.MODULE)
        names = [f"{site.parent}.{site.child}" for site in found if site.kind != "empty"]
        if not names:
            raise AttachError(f"{self.anatomy.model} has no attention or feed-forward modules to route")
        return names

    def begin(self, prompts: Sequence[Any], seed: int) -> Track:
        """Return a batch before its first step; its noise comes from a generator of `seed`.

        Raises:
            AttachError: If it has not as many samples as the batch the loop was learned from.
        """
        moments, _ = self._watch(prompts, seed, whole=False)
        if len(moments[0].sample) != self.count:
            raise AttachError(
                f"prompts={prompts!r}: {len(moments[0].sample)} samples with their branches; the "
                f"loop was learned from {self.count}, and all batches must have as many"
            )
        return Track(self, moments[0])

    def _watch(self, prompts: Sequence[Any], seed: int, whole: bool) -> tuple[list[Moment], Any]:
        recorder = Recorder(self.pipe, self.model, whole)
        return recorder.watch(prompts, seed, self.call), recorder

    def _check_constant(self, moments: list[Moment]) -> None:
        """Raise unless the calls differ in the sample and the timestep alone."""
        first, pipe = moments[0].calls, type(self.pipe).__name__
        counts = {len(moment.calls) for moment in moments}
        if counts not in ({1}, {2}):
            raise AttachError(
                f"{pipe} calls its denoiser {sorted(counts)} times a step; a router is trained "
                "with one call in every step, or two"
            )
        for moment in moments[1:]:
            for given, now in zip(first, moment.calls, strict=True):
                for name in (set(given) | set(now)) - {self.given, self.anatomy.timestep}:
                    if not _same(given.get(name), now.get(name)):
                        raise AttachError(
                            f"{self.anatomy.model}: its argument {name!r} changes from step to "
                            "step, so the loop cannot be replayed"
                        )


class Track:
    """One batch on its way through the loop: the next step, from 0, and the detached sample that the solver holds."""

    def __init__(self, replay: Replay, first: Moment) -> None:
        self.replay = replay
        self._calls, self._start = first.calls, first.sample
        self._shape = first.guided.shape
        self.restart()

    def restart(self) -> None:
        """Go back to the noise of the batch."""
        self.sample, self.index = self._start, 0
        self._solver = copy.deepcopy(self.replay.solver)

    def fork(self) -> Track:
        """Return another track at the same step, which goes on by itself."""
        other = copy.copy(self)
        other._solver = copy.deepcopy(self._solver)
        return other

    def predict(self, mixer: Mixer | None = None) -> Tensor:
        """Return the guided output at this step, with the variance where the model has one.

        A mixer is told which branch is called for.
        """
        replay, sample = self.replay, self.sample
        if hasattr(self._solver, "scale_model_input"):
            sample = self._solver.scale_model_input(sample, replay.times[self.index])
        outs = []
        times = replay.model_times[self.index]
        for number, (call, time) in enumerate(zip(self._calls, times, strict=True)):
            if mixer is not None:
                mixer.enter(number)
            was = call[replay.given]
            given = sample if len(sample) == len(was) else torch.cat([sample, sample])
            if given.shape != was.shape:
                raise AttachError(
                    f"{replay.anatomy.model} is given {tuple(was.shape)} where the solver holds "
                    f"{tuple(sample.shape)}; a router is trained where it is given the sample alone"
                )
            now = {**call, replay.given: given.to(was.dtype)}
            if replay.anatomy.timestep in call:
                now[replay.anatomy.timestep] = time
            outs.append(sample_of(replay.model(**now)))
        return _guide(outs, replay.scale, self._shape)

    def advance(self, guided: Tensor) -> None:
        """Take the solver's step with the output of `predict`, detached."""
        replay, shape = self.replay, self._shape
        taken = guided.detach()[: shape[0], : shape[1]]
        time = replay.times[self.index]
        out = self._solver.step(taken, time, self.sample, **{**replay.options, "return_dict": False})
        self.sample = out[0].detach()
        self.index += 1


def _guide(outs: list[Tensor], scale: float | None, shape: Sequence[int]) -> Tensor:
    """Return the guided output: the first channels guided, those of the variance as they are.

    Outputs are one with both branches in its batch, or one a branch; `shape` is what the solver takes.
    """
    both = torch.cat(outs) if len(outs) == 2 else outs[0]
    if scale is None:
        return both
    start, end = both[:, : shape[1]].chunk(2)
    guided = start + scale * (end - start)
    rest = both[:, shape[1] :]
    if rest.numel():  # the variance of both branches, beside the guided mean for each
        return torch.cat([torch.cat([guided, guided]), rest], 1)
    return torch.cat([guided, guided]) if shape[0] == both.shape[0] else guided


def _guidance_scale(moments: list[Moment]) -> float | None:
    """Return the scale with which a recorded run was guided, None if it was not.

    Raises:
        AttachError: If what the solver was given is no such combination of the branches.
    """
    shape = moments[0].guided.shape
    if all(len(m.outs) == 1 and _close(m.outs[0][:, : shape[1]], m.guided) for m in moments):
        return None
    dots = norms = 0.0
    pairs = [torch.cat(moment.outs)[:, : shape[1]].double() for moment in moments]
    even = all(len(pair) % 2 == 0 for pair in pairs)
    for moment, pair in zip(moments, pairs, strict=True) if even else ():
        start, end = pair.chunk(2)
        wanted = moment.guided[: len(start)].double()
        if wanted.shape == start.shape:
            dots += float(((wanted - start) * (end - start)).sum())
            norms += float((end - start).square().sum())
    scale = round(dots / norms, 4) if norms else 1.0
    made = (_guide(m.outs, scale, shape)[: shape[0], : shape[1]] for m in moments)
    if not even or not all(_close(one, m.guided) for one, m in zip(made, moments, strict=True)):
        raise AttachError(
            "what the solver is given is not a + scale * (b - a) of two guidance branches; a "
            "router is trained with plain guidance, or none"
        )
    return scale


def _close(made: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors agree up to rounding, relative to the largest value."""
    if made.shape != wanted.shape:
        return False
    gap = (made.double() - wanted.double()).abs().max()
    return bool(gap <= CLOSE.get(wanted.dtype, CLOSE_ENOUGH) * wanted.double().abs().max())


def _same(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal, tensors by value."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)

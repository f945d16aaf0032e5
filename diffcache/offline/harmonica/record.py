"""Record the inputs of denoiser and solver in one uncached call of a pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.anchor import owner_of
from diffcache.api import inspect as anatomies_of
from diffcache.attach.anatomy import Anatomy
from diffcache.errors import AttachError
from diffcache.offline.tracing import call_pipeline
from diffcache.step import Site
from diffcache.targets import check_free


class _EnoughError(Exception):
    """Ends a pipeline's call once its inputs are recorded."""


@dataclass
class Moment:
    """One step of a recorded run.

    Attributes:
        calls: Named arguments of the denoiser's calls.
        outs: Their samples.
        time: The timestep the solver was given.
        guided: The output the solver was given.
        sample: The sample the solver was given.
        after: Sample that the solver returned; empty where the run ended before.
        options: Further arguments of the solver's step.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    time: Any = None
    guided: Tensor = field(default_factory=lambda: torch.empty(0))
    sample: Tensor = field(default_factory=lambda: torch.empty(0))
    after: Tensor = field(default_factory=lambda: torch.empty(0))
    options: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Watches one call of a pipeline up to its first step or, if the whole is asked for, its last.

    Attributes:
        moments: The steps.
        solver: A copy of the scheduler as it was before the first step.
    """

    def __init__(self, pipe: Any, model: nn.Module, whole: bool) -> None:
        self.pipe, self.model, self.whole = pipe, model, whole
        self.arguments = list(inspect.signature(type(model).forward).parameters)[1:]
        self.moments: list[Moment] = []
        self.solver: Any = None
        self._open = Moment()

    def watch(self, prompts: Sequence[Any], seed: int, call: Mapping[str, Any]) -> list[Moment]:
        """Draw one batch and return its record.

        Raises:
            AttachError: If its scheduler took no step.
        """
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

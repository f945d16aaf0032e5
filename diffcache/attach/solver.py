"""Taps on a pipeline's call and on its scheduler: when runs and steps begin and end.

Both keep their class's name and pickle as their class; a copy of a tapped object is untapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diffcache.attach.anchor import claim, owner_of, release, subclass
from diffcache.attach.conditions import effective, other_guidance
from diffcache.attach.tap import FRAME
from diffcache.step import CURRENT

if TYPE_CHECKING:
    from diffcache.attach.handle import Handle

_SUBCLASSES: dict[type, type] = {}
_CALLBACKS = ("callback_on_step_end", "callback")


def tap_pipeline(pipeline: Any, handle: Handle) -> None:
    """Let every call of a pipeline be a run of `handle`."""
    base = type(pipeline)
    if base not in _SUBCLASSES:
        _SUBCLASSES[base] = subclass(base, __call__=_call(base.__call__))
    pipeline.__class__ = _SUBCLASSES[base]
    claim(pipeline, handle)


def tap_scheduler(scheduler: Any, handle: Handle) -> None:
    """Tell `handle` of a scheduler's runs and steps."""
    base = type(scheduler)
    if base in _SUBCLASSES.values():  # tapped for another pipeline that shares it
        claim(scheduler, handle)
        return
    if base not in _SUBCLASSES:
        members = {"set_timesteps": _set_timesteps(base.set_timesteps), "step": _step(base.step)}
        if hasattr(base, "set_begin_index"):
            members["set_begin_index"] = _set_begin_index(base.set_begin_index)
        _SUBCLASSES[base] = subclass(base, **members)
    scheduler.__class__ = _SUBCLASSES[base]
    claim(scheduler, handle)


def untap(tapped: Any, handle: Handle) -> None:
    """Give a pipeline or scheduler its own class back, unless another handle took it over."""
    if owner_of(tapped) is not handle:
        return
    if type(tapped) in _SUBCLASSES.values():
        tapped.__class__ = type(tapped).__mro__[1]
    release(tapped)


def _call(base: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(base)

    @functools.wraps(base)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        handle: Handle | None = owner_of(self)
        if handle is None:
            return base(self, *args, **kwargs)
        handle.follow(self)
        run, token = handle.begin(in_pipeline=True)
        tokens = FRAME.set(None), CURRENT.set(None)
        finished = False
        for name in _CALLBACKS:  # official ones are told by their class, and run no pipeline
            if callable(kwargs.get(name)) and not hasattr(kwargs[name], "tensor_inputs"):
                kwargs[name] = handle.aside(kwargs[name])
        try:
            if handle.tables:
                call = effective(signature, (self, *args), kwargs)
                handle.remark(run, other_guidance(handle.tables, call))
            out = base(self, *args, **kwargs)
            finished = not getattr(self, "_interrupt", False)
            return out
        finally:  # after an interrupt as well, which no module hook sees
            FRAME.reset(tokens[0])
            CURRENT.reset(tokens[1])
            handle.end(run, token, finished)

    return __call__


def _set_timesteps(base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base(self, *args, **kwargs)
        handle: Handle | None = owner_of(self)
        if handle is not None:
            timesteps = getattr(self, "timesteps", None)
            handle.restart(None if timesteps is None else len(timesteps))
            handle.set_times(self)
        return result

    return set_timesteps


def _set_begin_index(base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def set_begin_index(self: Any, begin_index: int = 0) -> Any:
        handle: Handle | None = owner_of(self)
        if handle is not None:
            handle.run().begin = int(begin_index)
        return base(self, begin_index)

    return set_begin_index


def _step(base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle: Handle | None = owner_of(self)
        if handle is not None:
            if handle.watches_steps:
                names = ("model_output", "timestep", "sample")
                handle.stepping(self, {**dict(zip(names, args, strict=False)), **kwargs})
            handle.run().ticks += 1
        return base(self, *args, **kwargs)

    return step

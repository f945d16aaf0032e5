"""Taps on a pipeline's call and on its scheduler: when runs and steps begin and end.

The methods of their classes are watched for as long as one of their instances is tapped, so that
`type(pipeline)` and `type(scheduler)` stay what they were: pipelines compare them. All other
instances pass straight through, but for a pipeline of that class that shares a wrapped denoiser:
its calls are runs as if inside `diffcache.run`. A copy of a tapped object is untapped.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from diffcache.anchor import ATTRIBUTE, claim, owner_of, release
from diffcache.attach.call import in_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.provenance import effective, other_guidance
from diffcache.attach.runs import Runs
from diffcache.foreign import CALLS, forget_planned_steps, frames_of_threads, is_pipeline, was_interrupted

_CALLBACKS = ("callback_on_step_end", "callback")
Make = Callable[["_Watch", Callable[..., Any]], Callable[..., Any]]

_LOCK = threading.RLock()  # a finalizer may run inside
_TAPPED: dict[int, tuple[type, Any]] = {}  # id of a tapped object -> its class and its finalizer
_WATCHED: dict[type, _Watch] = {}


class _Watch:
    """The methods put into one class while any of its instances is tapped.

    Args:
        kind: The class.
        makers: Method's name -> maker of what stands in for it.
    """

    def __init__(self, kind: type, makers: dict[str, Make]) -> None:
        self.kind = kind
        self._own = {name: vars(kind)[name] for name in makers if name in vars(kind)}
        self._put = {name: make(self, getattr(kind, name)) for name, make in makers.items()}
        for name, method in self._put.items():
            setattr(kind, name, method)

    def handle_of(self, instance: Any) -> Any:
        """Return the handle of an instance; None for others, and from a watch that is over.

        An instance of a subclass that calls `super()` is watched in its own class, if at all.
        """
        handle = owner_of(instance)
        return handle if _WATCHED.get(type(instance)) is self else None

    def end(self) -> None:
        """Give the class its own methods back, but for those that somebody replaced since."""
        for name, method in self._put.items():
            if vars(self.kind).get(name) is not method:
                continue
            if name in self._own:
                setattr(self.kind, name, self._own[name])
            else:
                delattr(self.kind, name)


def tap_pipeline(pipeline: Any, handle: Runs) -> None:
    """Let every call of a pipeline be a run of `handle`."""
    _tap(pipeline, handle, {"__call__": _call})


def tap_scheduler(scheduler: Any, handle: Runs) -> None:
    """Tell `handle` of a scheduler's runs and steps."""
    makers: dict[str, Make] = {"set_timesteps": _set_timesteps, "step": _step}
    if hasattr(type(scheduler), "set_begin_index"):
        makers["set_begin_index"] = _set_begin_index
    _tap(scheduler, handle, makers)


def tap_encoder(encoder: nn.Module, texts: Any) -> None:
    """Let the calls of a text encoder be answered by a `TextCache`."""
    _tap(encoder, texts, {"__call__": _encode})


def _tap(of: Any, handle: Any, makers: dict[str, Make]) -> None:
    kind = type(of)
    with _LOCK:
        if id(of) not in _TAPPED:  # else tapped for another pipeline that shares it
            ending = weakref.finalize(of, _leave, id(of))
            ending.atexit = False
            _TAPPED[id(of)] = kind, ending
        if kind not in _WATCHED:
            _WATCHED[kind] = _Watch(kind, {**makers, "__reduce_ex__": _reduce_ex})
    claim(of, handle)


def _leave(number: int) -> None:
    """Watch an object no longer; the last of its class ends the watch of the class."""
    with _LOCK:
        if number not in _TAPPED:
            return
        kind, ending = _TAPPED.pop(number)
        ending.detach()
        if all(other is not kind for other, _ in list(_TAPPED.values())):
            watch = _WATCHED.pop(kind, None)
            if watch is not None:
                watch.end()


def shared_with(parts: Iterable[Any]) -> Denoiser | None:
    """Return the wrapped denoiser among the parts of a pipeline that is not wrapped itself."""
    owners = map(owner_of, parts)
    return next((owner for owner in owners if isinstance(owner, Denoiser)), None)


def called_elsewhere(denoisers: Collection[nn.Module]) -> str | None:
    """Return the class of a caller of some denoisers in another thread; None if there is none.

    A run that has begun without a cache would end with one. Nobody noted that it began, so that the
    frames of the threads are looked at.
    """
    frames = frames_of_threads()
    frames.pop(threading.get_ident(), None)  # a frame that holds itself would outlive its return
    for frame in frames.values():
        while frame is not None:
            if frame.f_code.co_name in CALLS:
                caller: Any = frame.f_locals.get("self")
                components = caller.components if is_pipeline(caller) else {"": caller}
                if any(part is each for part in components.values() for each in denoisers):
                    return type(caller).__name__
            frame = frame.f_back
    return None


def untap(tapped: Any, handle: Any) -> None:
    """Let go of a pipeline or scheduler, unless another handle took it over.

    One whose attributes the pipeline put back from a copy, as panoramas do for every view, has no owner any more.
    """
    if owner_of(tapped) in (handle, None):
        release(tapped)
        _leave(id(tapped))


def _reduce_ex(watch: _Watch, base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        reduced = base(self, protocol)
        if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = {key: value for key, value in reduced[2].items() if key != ATTRIBUTE}
        return (*reduced[:2], state, *reduced[3:])  # a copy is untapped

    return __reduce_ex__


def _call(watch: _Watch, base: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(base)

    @functools.wraps(base)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        handle = own = watch.handle_of(self)
        # Of a pipeline that was wrapped anew above this watch, the newer watch tells the run.
        if handle is None and owner_of(self) is None:
            owner = shared_with(vars(self).values())
            handle = None if owner is None else owner.handle
        if handle is None:
            return base(self, *args, **kwargs)
        if own is not None:
            handle.follow(self)
        handle.settle()
        run, token = handle.begin(in_pipeline=own is not None, is_told=own is None)
        run.caller, finished = self, False
        forget_planned_steps(self)
        for name in _CALLBACKS:
            if callable(given := kwargs.get(name)):
                if hasattr(given, "tensor_inputs"):  # which a pipeline reads off objects of diffusers
                    kwargs["callback_on_step_end_tensor_inputs"] = given.tensor_inputs
                kwargs[name] = handle.aside(run, given)
        try:
            if own is not None:
                handle.remark(run, handle.replaced(self))
            if handle.tables:
                call = effective(signature, (self, *args), kwargs)
                handle.remark(run, other_guidance(handle.tables, call))
            with in_call(None):
                try:
                    out = base(self, *args, **kwargs)
                finally:
                    handle.settle()
            finished = not was_interrupted(self)
            return out
        finally:
            handle.end(run, token, finished)

    return __call__


def _encode(watch: _Watch, base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        texts = None if torch.compiler.is_compiling() else watch.handle_of(self)
        if texts is None:
            return base(self, *args, **kwargs)
        return texts.answer(self, functools.partial(base, self, *args, **kwargs), args, kwargs)

    return __call__


def _set_timesteps(watch: _Watch, base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base(self, *args, **kwargs)
        handle = watch.handle_of(self)
        if handle is not None:
            handle.restart(getattr(self, "timesteps", None))
            handle.set_times(self)
        return result

    return set_timesteps


def _set_begin_index(watch: _Watch, base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def set_begin_index(self: Any, begin_index: int = 0) -> Any:
        handle = watch.handle_of(self)
        if handle is not None:
            handle.run().begin = int(begin_index)
        return base(self, begin_index)

    return set_begin_index


def _step(watch: _Watch, base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = watch.handle_of(self)
        if handle is not None:
            if handle.watches_steps:
                names = ("model_output", "timestep", "sample")
                handle.stepping(self, {**dict(zip(names, args, strict=False)), **kwargs})
            handle.run().ticks += 1
        out = base(self, *args, **kwargs)
        if handle is not None:
            run = handle.run()
            if not run.in_pipeline and run.steps is None and run.ticks == run.total:  # nobody will say that it ends
                run.drop()
        return out

    return step

"""Read diffusers' `cache_context`: the branch's name and the step of a call.

A user names a branch with `branch`, a pipeline with diffusers' `cache_context`. diffusers hands the
context to the stateful hooks in a model's registry. A `Listener` sits there as a hook that never
touches the forward; what it hears is kept per thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from diffcache.features.base import check_int
from diffcache.foreign import drop_registry, put_below, registry_of, take_out


@dataclass(eq=False)
class Context:
    """Name, step and kind of the next call, as `cache_context` of diffusers or the user gave them."""

    name: str | None = None  # name of the guidance branch, None where nobody said one
    step_index: int | None = None  # index of the step, None where nobody said it
    writes: bool = False  # whether the call writes to a stream


_NAME = "diffcache"
_HEARD: ContextVar[tuple[int, Context] | None] = ContextVar("diffcache_context", default=None)
_SAID: ContextVar[Context | None] = ContextVar("diffcache_said", default=None)


def branch(name: str, step: int | None = None) -> AbstractContextManager[None]:
    """Name the guidance branch of the calls inside, and say which step they belong to.

    A bare denoiser tells the branches of a step by what they are conditioned on, and computes where
    that does not tell. Calls inside this context belong to the branch of this name instead: it has
    features of its own, whatever its calls are given. One call a timestep may have the name; the
    first branch of a step decides for all of them whether the step is computed.

    Args:
        name: Any text, the same at every step.
        step: Number of the step in its run, from 0, for loops whose timestep does not tell it: a
            solver may come to one twice. None leaves it to the timestep.

    Raises:
        ValueError: If the name is no text, or empty, or the step is no whole number of 0 or more.

    Examples:
        >>> with diffcache.branch("uncond"):  # doctest: +SKIP
        ...     noise = model(x, t, encoder_hidden_states=blank)
    """
    given: object = name
    if not isinstance(given, str) or not given:
        raise ValueError(f"branch name {name!r}: must be text, such as 'uncond'")
    if step is not None:
        check_int("step", step, 0)
    return _said(name=name, step_index=step)


def writing() -> AbstractContextManager[None]:
    """Say that the denoiser calls inside write to a stream, such as a KV cache of past chunks.

    They are computed in full, whatever the method (quantized layers as they were before, nothing
    looked up), and are no steps of the sampling run: the steps around them are computed and
    skipped as if they were not there. A loop that owns a cache opens this around the call that
    commits a chunk; `diffcache.stream` says which chunks belong together. It does nothing for a
    denoiser that is not wrapped.

    Examples:
        >>> with diffcache.writing():  # doctest: +SKIP
        ...     model(clean_chunk, zero, cond)
    """
    return _said(writes=True)


@contextmanager
def _said(**what: Any) -> Iterator[None]:
    """Add facts to the context of the calls inside."""
    token = _SAID.set(replace(_SAID.get() or Context(), **what))
    try:
        yield
    finally:
        _SAID.reset(token)


def current_context(model: nn.Module) -> Context | None:
    """Return the context of a call of `model` in this thread; None without one.

    A pipeline's word goes before the user's, which is outside it.
    """
    heard, said = _HEARD.get(), _SAID.get()
    if heard is None or heard[0] != id(model):
        return said
    if said is None or not said.writes:
        return heard[1]
    return replace(heard[1], writes=True)


def listen(model: nn.Module) -> None:
    """Start to hear the contexts of a model, if it can open them."""
    if not hasattr(model, "cache_context"):
        return
    from diffusers.hooks import HookRegistry
    from diffusers.hooks.hooks import HookFunctionReference, StateManager

    had = registry_of(model) is not None
    registry = HookRegistry.check_if_exists_or_initialize(model)
    if _NAME in registry.hooks:  # the deaf one of a copy
        take_out(registry, _NAME)
    put_below(registry, _NAME, _listener(StateManager, model, had), HookFunctionReference())


def unlisten(model: nn.Module) -> None:
    """Stop hearing; remove the registry if it was not there before."""
    registry = registry_of(model)
    if registry is None or _NAME not in registry.hooks:
        return
    listener = take_out(registry, _NAME)
    if not listener.had_registry and not registry.hooks:
        drop_registry(model)


class Listener:
    """A stateful hook in the eyes of diffusers, which does nothing but listen.

    Copies and pickles are deaf.
    """

    _is_stateful = True

    def __init__(self, manager: Any, had_registry: bool) -> None:
        self.manager = manager
        self.had_registry = had_registry

    def __reduce__(self) -> tuple[Any, ...]:
        return Listener, (None, True)

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Keep nothing; the state is the engine's."""
        return module

    def _set_context(self, module: nn.Module, name: str | None) -> None:
        """Note the context as diffusers before 0.41 announces it: through the hook itself."""
        self.manager.set_context(name)


def _listener(manager_class: type, model: nn.Module, had_registry: bool) -> Listener:
    """Return a listener whose state manager notes every context."""
    return Listener(_manager_class(manager_class)(id(model)), had_registry)


_MANAGERS: dict[type, type] = {}


def _manager_class(base: type) -> type:
    if base not in _MANAGERS:

        class Manager(base):  # type: ignore[misc]
            """Notes the context in this thread instead of in itself."""

            def __init__(self, key: int) -> None:
                self.key = key

            def set_context(self, context: Any) -> None:
                """Note the context, None when it ends."""
                if context is None:
                    _HEARD.set(None)
                    return
                name = getattr(context, "name", context)
                _HEARD.set((self.key, Context(str(name), getattr(context, "step_index", None))))

            def reset(self, *args: Any, **kwargs: Any) -> None:
                """Keep nothing."""

        Manager.__qualname__ = "Manager"
        _MANAGERS[base] = Manager
    return _MANAGERS[base]

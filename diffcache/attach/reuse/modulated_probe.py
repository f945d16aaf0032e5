"""The modulated input of the first block, seen without running the block."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.anatomy import Anatomy
from diffcache.errors import AttachError
from diffcache.foreign import take_hooks, uncompiled, version_of

PEEKING: ContextVar[bool] = ContextVar("diffcache_peeking", default=False)


class StopForward(BaseException):
    """Carries the first attention's inputs out of a block that is cut short.

    No `Exception`, which a model might handle.
    """

    def __init__(self, inputs: dict[int | str, Tensor]) -> None:
        self.inputs = inputs


class Peek:
    """Runs a block up to its first attention, which costs its norm and modulation.

    Every block's first attention gets a forward pre-hook that does nothing but in a peek: any
    block may be the first that runs, and blocks that are alike compile to one graph. Hooks of
    offloading sit in the modules' `forward` and work as in a full call.

    Attributes:
        other: Inputs of the first attention in a call with another sample; the next look learns
            from them which one changes with the sample.

    Args:
        model: The denoiser.
        anatomy: Its anatomy.

    Raises:
        AttachError: If no block has an attention, or the first of a UNet has none.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self._model, self._name = model, anatomy.model
        self.other: dict[int | str, Tensor] | None = None
        self._key: int | str = "hidden_states"
        found: dict[str, str] = {}
        for site in anatomy.modules:
            block = ".".join(site.parent.split(".")[: site.list_key.count(".") + 2])
            if site.kind == "attention":
                found.setdefault(block, f"{site.parent}.{site.child}")
        self._paths = list(found.values())
        first = f"{anatomy.lists[0].key}.0"
        if not found or (anatomy.is_unet and first not in found):  # a UNet starts at the top
            raise AttachError(
                f"{anatomy.model}: {first} has no attention module, whose input a 'modulated' "
                "probe is; use a gate of='residual' with lead=1, as FirstBlock"
            )
        self._watched: dict[int, nn.Module] = {}
        self._watch()

    def _watch(self) -> bool:
        """Hook the attentions that have no hook yet; return whether there were any."""
        fresh = False
        for path in self._paths:
            module = self._model.get_submodule(path)
            if id(module) not in self._watched:
                unwatch(module)  # a copy of a watched one
                module.register_forward_pre_hook(watch, prepend=True, with_kwargs=True)
                self._watched[id(module)] = module
                fresh = True
        return fresh

    def remove(self) -> None:
        """Leave the model as it was found."""
        for module in self._watched.values():
            unwatch(module)
        self._watched = {}

    def look(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the input `[B, T, D]` of the first attention that `run` comes to, as `inputs` finds it.

        It is the first that differs from `other`, else one called `hidden_states` or the first;
        AttachError if none differs.
        """
        inputs = self.inputs(run, args, kwargs)
        if self.other is not None:
            other, self.other = self.other, None
            changed = [k for k, v in inputs.items() if k not in other or not torch.equal(v, other[k])]
            if not changed:
                raise AttachError(
                    f"{self._name}: what its first attention is given does not change with the "
                    "sample; use a gate of='residual' with lead=1, as FirstBlock"
                )
            self._key = changed[0]
        return inputs[self._key if self._key in inputs else next(iter(inputs))]

    def inputs(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
        """Return the tensors, by place or name, that the first attention that `run` comes to is about to be given.

        `run` is a block's forward, or the forward of the model with `plain` blocks. A tensor called
        `hidden_states` comes first. Raises AttachError if no attention is come to, or the way there
        changes an argument.
        """
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        versions = [_version(tensor) for tensor in tensors]
        token = PEEKING.set(True)
        try:
            run(*args, **kwargs)
            if self._watch():  # blocks were replaced since
                run(*args, **kwargs)
        except StopForward as seen:
            if versions != [_version(tensor) for tensor in tensors]:
                raise AttachError(
                    f"{self._name}: its first block writes to its input before its attention, so "
                    "it cannot be looked into; use a gate of='residual' with lead=1, as FirstBlock"
                ) from None
            return seen.inputs
        finally:
            PEEKING.reset(token)
        raise AttachError(
            f"{self._name}: the block that runs first calls none of the attentions that were found "
            f"({self._paths[0]} and so on); use a gate of='residual' with lead=1, as FirstBlock"
        )


def plain(block: nn.Module) -> Any:
    """Return a block's forward as written, which `torch.compile` would run without its hooks."""
    return uncompiled(block).forward


def run_plain(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block as written, even where it is compiled."""
    return plain(block)(*args, **kwargs)


def run_unwatched(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block in full in a peek, as the probe comes after it."""
    token = PEEKING.set(False)
    try:
        return block(*args, **kwargs)
    finally:
        PEEKING.reset(token)


def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention: in a peek, end the call with its tensors."""
    if torch.compiler.is_compiling() or not PEEKING.get():
        return
    given: dict[int | str, Any] = {"hidden_states": kwargs.get("hidden_states")}
    given.update(enumerate(args))
    given.update(kwargs)
    inputs = {key: value.detach() for key, value in given.items() if isinstance(value, Tensor)}
    if inputs:
        raise StopForward(inputs)


def unwatch(module: nn.Module) -> None:
    """Take the hook of peeks off a module."""
    take_hooks(module, lambda hook: hook is watch)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; inference tensors do not count it."""
    return 0 if tensor.is_inference() else version_of(tensor)

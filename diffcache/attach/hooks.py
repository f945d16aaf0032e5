"""The two hooks of a wrapped denoiser: top-level functions, so that copies and pickles work."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import torch
from torch import nn

from diffcache.anchor import claim, owner_of
from diffcache.attach.cache_context import current_context
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError, CacheWarning
from diffcache.foreign import own_hooks, take_hooks, without_dynamo
from diffcache.step import CURRENT

TOKEN = "token"  # of the context variable, in a call's storage


def hook(denoiser: Denoiser) -> None:
    """Let every call of a denoiser's network be one of the denoiser."""
    model = denoiser.model
    pre = model.register_forward_pre_hook(open_call, prepend=True, with_kwargs=True)
    post = model.register_forward_hook(close_call, with_kwargs=True, always_call=True)
    denoiser.hooks = [pre, post]
    claim(model, denoiser)


def open_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a wrapped denoiser; does nothing on a copy of one."""
    if torch.compiler.is_compiling():
        _refuse_compiled(module)
        return None
    denoiser: Denoiser | None = owner_of(module)
    if denoiser is None:
        _orphan(module)
        return None
    stale: Call | None = CURRENT.get()
    if stale is not None and stale.owner is denoiser:
        denoiser.handle.settle()
    if torch.is_grad_enabled() and _trains(denoiser, args, kwargs):
        return None
    try:
        call = denoiser.open(args, kwargs)
    except BaseException:
        denoiser.handle.abandon(writes=_writes(denoiser))
        raise
    call.storage[TOKEN] = CURRENT.set(call)
    if call.args is args and call.kwargs is kwargs:
        return None
    return call.args, call.kwargs


def _trains(denoiser: Denoiser, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether gradients go through a call; it then runs as if it were not wrapped.

    No call is open: what is skipped has no gradient, and checkpointed blocks run once more when
    the call is over. Features of this run are forgotten, which are of earlier steps.
    """
    tensors = chain(denoiser.model.parameters(), leaves(args), leaves(kwargs))  # mostly the first
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    run = denoiser.handle.run()
    if not _writes(denoiser):  # which is no step
        run.timeline(denoiser).clear()
    text = (
        f"{denoiser.anatomy.model}: gradients are on, so every block is computed and nothing is "
        "kept; to sample, call it under torch.no_grad()"
    )
    denoiser.handle.remark(run, [text])
    return True


def _writes(denoiser: Denoiser) -> bool:
    """Return whether it was said that the call at hand writes to a stream."""
    context = current_context(denoiser.model)
    return context is not None and context.writes


def close_call(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """Forward hook of a wrapped denoiser, called after exceptions as well."""
    if torch.compiler.is_compiling():
        return None
    denoiser: Denoiser | None = owner_of(module)
    call: Call | None = CURRENT.get()
    if denoiser is None or call is None or call.owner is not denoiser:
        return None
    CURRENT.reset(call.storage.pop(TOKEN))
    try:
        if out is not None:
            return denoiser.close(call, out)
        denoiser.handle.abandon(call)  # an exception is on its way
        return None
    except BaseException:  # the step is half done
        denoiser.handle.abandon(call)
        raise
    finally:
        call.storage.clear()  # which may refer to the call, and so keep the model alive


@without_dynamo
def _refuse_compiled(module: nn.Module) -> None:
    """Raise for a wrapped model that is being compiled as a whole; a copy of one may be."""
    if owner_of(module) is not None:
        raise AttachError(
            f"{type(module).__name__} is compiled as a whole, which fixes what runs; compile its "
            "blocks instead: model.compile_repeated_blocks(fullgraph=True)"
        )
    _orphan(module)


def _orphan(module: nn.Module) -> None:
    """Take the hooks off a copy of a wrapped model and say that it runs uncached."""
    own_hooks(module)  # a shallow copy shares them with the original
    take_hooks(module, lambda hook: hook is open_call or hook is close_call)
    warnings.warn(
        f"this {type(module).__name__} is a copy of a wrapped one and runs uncached; wrap it too",
        CacheWarning,
        stacklevel=4,
    )

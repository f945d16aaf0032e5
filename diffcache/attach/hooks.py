"""The two hooks of a wrapped denoiser: top-level functions, so that copies and pickles work."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diffcache.attach.anchor import owner_of
from diffcache.attach.tap import FRAME
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError, CacheWarning
from diffcache.step import CURRENT

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine
    from diffcache.attach.handle import Handle


def open_frame(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a wrapped denoiser; does nothing on a copy of one."""
    if torch.compiler.is_compiling():
        _refuse_compiled(module)
        return None
    engine = owner_of(module)
    if engine is None:
        _orphan(module)
        return None
    stale = FRAME.get()
    if stale is not None and stale.engine is engine:  # left by an interrupt, which no hook sees
        leave(engine.handle)
        engine.handle.abandon()
    if torch.is_grad_enabled() and _trains(engine, args, kwargs):
        return None
    try:
        frame, given = engine.open(args, kwargs)
    except BaseException:
        engine.handle.abandon()
        raise
    frame.token = FRAME.set(frame), CURRENT.set(frame.step)
    return given


def _trains(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether gradients go through a call; it then runs as if it were not wrapped.

    No frame is open: what is skipped has no gradient, and checkpointed blocks run once more when
    the call is over. Features of this run are forgotten, which are of earlier steps.
    """
    tensors = chain(engine.model.parameters(), leaves(args), leaves(kwargs))  # mostly the first
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    run = engine.handle.run()
    run.timeline(engine).clear()
    text = (
        f"{engine.anatomy.model}: gradients are on, so every block is computed and nothing is "
        "kept; to sample, call it under torch.no_grad()"
    )
    engine.handle.remark(run, [text])
    return True


def close_frame(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """Forward hook of a wrapped denoiser, called after exceptions as well."""
    if torch.compiler.is_compiling():
        return None
    engine = owner_of(module)
    frame = FRAME.get()
    if engine is None or frame is None or frame.engine is not engine:
        return None
    FRAME.reset(frame.token[0])
    CURRENT.reset(frame.token[1])
    if out is None:  # an exception is on its way
        engine.handle.abandon()
        return None
    try:
        return engine.close(frame, kwargs, out)
    except BaseException:  # the step is half done
        engine.handle.abandon()
        raise


def leave(handle: Handle) -> None:
    """Leave the denoiser call that an interrupt left open in this thread, if it is a handle's."""
    frame = FRAME.get()
    if frame is not None and frame.engine.handle is handle:
        FRAME.set(None)
        CURRENT.set(None)


# not torch.compiler.disable, which imports the compiler at once
@torch._disable_dynamo  # type: ignore[attr-defined]
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
    for name, hook in (("_forward_pre_hooks", open_frame), ("_forward_hooks", close_frame)):
        hooks = getattr(module, name)  # which a shallow copy shares with the original
        kept = {key: value for key, value in hooks.items() if value is not hook}
        setattr(module, name, type(hooks)(kept))
    warnings.warn(
        f"this {type(module).__name__} is a copy of a wrapped one and runs uncached; wrap it too",
        CacheWarning,
        stacklevel=4,
    )

"""Tell lists of blocks that feed each other from lists that stand side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.attach.reuse.again import again
from diffcache.attach.reuse.frame import Frame
from diffcache.attach.reuse.trace import Trace
from diffcache.attach.tap import Tap
from diffcache.attach.tree import Template, leaves
from diffcache.errors import AttachError
from diffcache.step import Site


class _Arrived(BaseException):
    """Says that a later block was reached; no `Exception`, which a model might handle."""


class _PoisonTap(Tap):
    """A block of a list whose first call returns NaN, and whose later calls look for it."""

    __slots__ = ("calls",)

    def __init__(self, module: Any, calls: list[None]) -> None:
        super().__init__(module)
        self.calls = calls  # of the whole list

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        if self.calls and any(bool(t.isnan().any()) for t in leaves([args, kwargs])):
            raise _Arrived
        out = self.module(*args, **kwargs)
        if self.calls:
            return out
        self.calls.append(None)
        return Template(out).build([_poisoned(tensor) for tensor in leaves(out)])


def leave_loose(frame: Frame, trace: Trace, call: tuple[Any, Any]) -> None:
    """Leave lists out of a trace whose blocks do not feed each other: they always run.

    Where no output was seen to arrive unchanged at the next block, the model's loop may have
    transformed it, or the blocks stand side by side, such as one projection for every layer of a
    text encoder. The forward runs once more to tell: NaN in the place of the first block's output
    reaches a later one, or it does not.

    Args:
        frame: The frame of the traced call.
        trace: Record of that call.
        call: Its positional and keyword arguments.

    Raises:
        AttachError: If no list is left.
    """
    anatomy = frame.setup.anatomy
    if anatomy.is_unet:
        return
    loose = {key for key in trace.unlinked() if not _is_chain(frame, key, call)}
    chained = [traced for traced in trace.calls if traced.list_key not in loose]
    if not chained:
        raise AttachError(
            f"{anatomy.model}: the blocks of {', '.join(sorted(loose))} do not feed each "
            "other, and no other list of at least two blocks ran, so there is nothing to skip"
        )
    if frame.setup.site is not Site.MODEL:  # where what they return is not needed either
        trace.calls = chained


def _is_chain(frame: Frame, key: str, call: tuple[Any, Any]) -> bool:
    """Return whether what the first block of a list returns reaches a later one."""
    calls: list[None] = []
    items = {key: [_PoisonTap(block, calls) for block in frame.setup.blocks[key]]}
    try:
        again(frame, items, call)
    except _Arrived:
        return True
    except Exception:  # it does not work with NaN; the check of the layout will tell
        return True
    return False


def _poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor

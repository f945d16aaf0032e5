"""Questions that a traced call leaves open, answered by running the denoiser once more.

Other stand-ins take the places of its blocks, and random numbers are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.call import in_call
from diffcache.attach.reuse.frame import FRAME, Frame
from diffcache.attach.reuse.modulated_probe import Peek, plain
from diffcache.attach.reuse.setup import Setup
from diffcache.attach.reuse.trace import BlockCall, Reach, Trace
from diffcache.attach.tap import ITEMS, ServedTap
from diffcache.attach.tree import Template, leaves, unshared
from diffcache.errors import AttachError
from diffcache.step import Site


def again(
    frame: Frame,
    items: dict[str, list[Any]],
    given: tuple[Any, Any],
    look: Callable[..., Any] | None = None,
) -> Any:
    """Run the denoiser once more under a frame, with other items.

    Args:
        frame: The frame of the call.
        items: Items to hand out for the lists of blocks.
        given: Positional and keyword arguments.
        look: Runs the forward that it is given with these arguments, in a way of its own.
    """
    args, kwargs = unshared(given)
    forward = frame.setup.model.forward
    repeat = replace(frame.call, repeats=True, storage={FRAME: frame, ITEMS: items})
    assert frame.random is not None
    with in_call(repeat), frame.random.replayed():
        return forward(*args, **kwargs) if look is None else look(forward, args, kwargs)


# which lists feed each other ----------------------------------------------------------------------


class _Arrived(BaseException):
    """Says that a later block was reached; no `Exception`, which a model might handle."""


def _poison(calls: list[None], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block of a list; the first call returns NaN, and later ones look for it."""
    if calls and any(bool(t.isnan().any()) for t in leaves([args, kwargs])):
        raise _Arrived
    out = block(*args, **kwargs)
    if calls:
        return out
    calls.append(None)
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
    items = {key: [ServedTap(block, partial(_poison, calls)) for block in frame.setup.blocks[key]]}
    try:
        again(frame, items, call)
    except _Arrived:
        return True
    except Exception:  # it does not work with NaN; the check of the layout will tell
        return True
    return False


def _poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor


# which inputs change with the sample --------------------------------------------------------------


def reach_of(frame: Frame, trace: Trace, call: tuple[Any, Any]) -> Reach | None:
    """Return what of the blocks' inputs changes with the sample, by running the denoiser again.

    Its sample is another one, and blocks that are given something else than in the traced call
    return zeros. So it costs what the model does outside its blocks, and the blocks of the text.

    Args:
        frame: The frame of the traced call.
        trace: Record of that call.
        call: Its positional and keyword arguments.

    Returns:
        None where nothing depends on it (a UNet, one list without a gate), where the call has no
        values, and without a gate where nothing is seen to change.

    Raises:
        AttachError: If a gate would have nothing to look at.
    """
    setup, anatomy = frame.setup, frame.setup.anatomy
    gated = setup.waits
    needed = gated or len(setup.blocks) > 1
    sample = leaves(call[1].get(anatomy.sample, call[0][0] if call[0] else None))
    has_values = not any(leaf.is_meta for leaf in sample)
    if anatomy.is_unet or not needed or not has_values:
        return None
    follow = Follow(setup, trace)
    items: dict[str, list[Any]] = {
        key: [ServedTap(b, partial(follow.call, key, i)) for i, b in enumerate(setup.blocks[key])]
        for key in follow.firsts
    }
    other, failure = _with(call, {id(tensor) for tensor in sample}), None
    try:
        with torch.no_grad():
            again(frame, items, other)
    except AttachError:
        raise
    except Exception as error:
        failure = error
    if failure is None and any(follow.reach.values()):
        return follow.reach
    if not gated:
        return None
    why = f" ({failure})" if failure is not None else ""
    raise AttachError(
        f"{anatomy.model}: nothing that its blocks are given was seen to change with "
        f"{anatomy.sample!r}{why}, so a gate has nothing to look at; use a schedule, such "
        "as Interval or TaylorSeer"
    ) from failure


class Follow:
    """Compares what blocks are given with what the traced call gave them.

    Attributes:
        reach: List -> the arguments of its first block that changed.
        firsts: List -> its first call in the traced call.

    Args:
        setup: Setup of reuse on the denoiser.
        trace: Record of the traced call.
    """

    def __init__(self, setup: Setup, trace: Trace) -> None:
        self.reach: Reach = {}
        self._peek = setup.peek if isinstance(setup.peek, Peek) else None
        self.firsts = {call.list_key: call for call in reversed(trace.calls)}
        self._outputs = {(call.list_key, call.index): call.hollow for call in trace.calls}

    def call(self, key: str, index: int, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a block whose list is given what it was, else return zeros."""
        if key not in self.reach:
            changed = _changed(self.firsts[key], {**dict(enumerate(args)), **kwargs})
            if changed and self._peek is not None and not any(self.reach.values()):
                self._peek.other = self._peek.inputs(plain(module), args, kwargs)
            self.reach[key] = changed
        if not self.reach[key]:
            return module(*args, **kwargs)
        out = self._outputs[key, index]
        return Template(out).build([zeros.clone() for zeros in leaves(out)])


def _changed(first: BlockCall, given: dict[Any, Any]) -> list[Any]:
    """Return which tensors a block was not given as in the traced call."""
    return [
        key
        for key, value in first.arguments.items()
        if not isinstance(given.get(key), Tensor) or not torch.equal(given[key], value)
    ]


def _with(value: Any, sample: set[int]) -> Any:
    """Return a call with other values in the tensors of its sample, tokens within their range."""
    if isinstance(value, Tensor) and id(value) in sample:
        if value.is_floating_point():
            return 1 - value
        return ~value if value.dtype is torch.bool else torch.where(value > 0, value - 1, value + 1)
    if type(value) in (list, tuple):
        return type(value)([_with(item, sample) for item in value])
    if type(value) is dict:
        return {key: _with(item, sample) for key, item in value.items()}
    return value

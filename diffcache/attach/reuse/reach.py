"""Find the lists of blocks whose input changes with the sample, in a call with another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.reuse.again import again
from diffcache.attach.reuse.frame import Frame
from diffcache.attach.reuse.modulated_probe import Peek, plain
from diffcache.attach.reuse.setup import Setup
from diffcache.attach.reuse.trace import BlockCall, Reach, Trace
from diffcache.attach.tap import Tap
from diffcache.attach.tree import Template, leaves
from diffcache.errors import AttachError


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
    gated = setup.parts.when.probe is not None
    needed = gated or len(setup.blocks) > 1
    sample = leaves(call[1].get(anatomy.sample, call[0][0] if call[0] else None))
    has_values = not any(leaf.is_meta for leaf in sample)
    if anatomy.is_unet or not needed or not has_values:
        return None
    follow = Follow(setup, trace)
    items: dict[str, list[Any]] = {
        key: [FollowTap(block, follow, key, index) for index, block in enumerate(setup.blocks[key])]
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

    def call(self, tap: FollowTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block whose list is given what it was, else return zeros."""
        if tap.key not in self.reach:
            changed = _changed(self.firsts[tap.key], {**dict(enumerate(args)), **kwargs})
            if changed and self._peek is not None and not any(self.reach.values()):
                self._peek.other = self._peek.inputs(plain(tap.module), args, kwargs)
            self.reach[tap.key] = changed
        if not self.reach[tap.key]:
            return tap.module(*args, **kwargs)
        out = self._outputs[tap.key, tap.index]
        return Template(out).build([zeros.clone() for zeros in leaves(out)])


class FollowTap(Tap):
    """A block in a call with another sample."""

    __slots__ = ("follow", "index", "key")

    def __init__(self, module: nn.Module, follow: Follow, key: str, index: int) -> None:
        super().__init__(module)
        self.follow, self.key, self.index = follow, key, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        return self.follow.call(self, args, kwargs)


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

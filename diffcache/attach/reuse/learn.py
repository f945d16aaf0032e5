"""Learn a kind of call: its wiring from a traced forward, and a check that skipping is exact.

What a traced call leaves open is answered by running the denoiser once more: other stand-ins take
the places of its blocks, and random numbers are left as they were.
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
from diffcache.attach.reuse.layout import Layout
from diffcache.attach.reuse.modulated_probe import Peek, plain, run_plain, run_unwatched
from diffcache.attach.reuse.plan import keep, plan, protect_all
from diffcache.attach.reuse.setup import Setup, use_sites
from diffcache.attach.reuse.stand_in import main_stream
from diffcache.attach.reuse.trace import BlockCall, Reach, Trace
from diffcache.attach.signature import writes_cache
from diffcache.attach.tap import ITEMS, ServedTap, Tap
from diffcache.attach.tree import Template, leaves, unshared
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site


def again(
    frame: Frame, items: dict[str, list[Any]], given: tuple[Any, Any], look: Callable[..., Any] | None = None
) -> Any:
    """Run the denoiser once more under a frame, with other items in its lists of blocks, or as `look` does."""
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
    reaches a later one, or it does not. Raises AttachError if no list is left.
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
    """Return whether an output of the first block of a list reaches a later one."""
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
    """Return the block inputs that change with the sample, by running the denoiser again.

    Its sample is another one, and blocks that are given something else than in the traced call
    return zeros. So it costs what the model does outside its blocks, and the blocks of the text.
    None where nothing depends on it (a UNet, one list without a gate), where the call has no
    values, and without a gate where nothing is seen to change; a gate then has nothing to look at,
    which raises AttachError.
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
    """Compares the inputs of blocks with those of the traced call.

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
        """Run a block whose list has its traced inputs, else return zeros."""
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


# running a model again ----------------------------------------------------------------------------


# How spans are laid out, in turn: as seen; then for loops that write to their streams in place,
# their additions live; then for loops that do more to the streams than add to them, with what they
# did in the features. The second of each: whether tensors that are held or handed out are copied.
ATTEMPTS = (("mixed", False), ("all", True), ("none", False), ("none", True))
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}  # by bytes of a number, relative to the largest


def learn(frame: Frame, trace: Trace, call: tuple[Any, Any]) -> None:
    """Lay out the method over the traced call, of positional and keyword arguments, and keep that call's features.

    Raises AttachError if no chain of blocks ran or no block would be skipped.
    """
    setup = frame.setup
    if not trace.calls:
        raise AttachError(f"{setup.anatomy.model}: no block of its lists ran; nothing to cache")
    if not writes_cache(call[1]):
        leave_loose(frame, trace, call)
        trace.reach = reach_of(frame, trace, call)
    layout = lay_out(setup, trace, setup.parts)
    frame.layout = layout
    if not keep(frame, layout, trace.calls):
        again(frame, layout.compute, call)
    if setup.peek is not None:
        items = {
            key: [ServedTap(b, run_plain if key in layout.streams else run_unwatched) for b in group]
            for key, group in setup.blocks.items()
        }
        probe = again(frame, items, call, setup.peek.look)
        if frame.decides:
            frame.decide(probe)
    elif frame.decides and setup.probe == "input":
        _show_inputs(frame, layout, trace)
    elif frame.decides and setup.waits:
        places = {(traced.list_key, traced.index): traced for traced in trace.calls}
        first, last = places[layout.lead_calls[0]], places[layout.lead_calls[-1]]
        argument = main_stream(layout, first.list_key)[0]
        number = main_stream(layout, last.list_key)[1]
        frame.decide(frame.probe_of(first.arguments[argument], last.outputs[number]))


def _show_inputs(frame: Frame, layout: Layout, trace: Trace) -> None:
    """Show the blocks' own gates the inputs of the traced call."""
    frame.decide(None)
    for traced in trace.calls:
        key, index = traced.list_key, traced.index
        if key in layout.streams and isinstance(layout.skip[key][index], Tap):
            frame.asks_block(f"{key}.{index}", traced.arguments[main_stream(layout, key)[0]])


def verify(frame: Frame, trace: Trace, call: tuple[Any, Any], out: Any) -> bool:
    """Skip the blocks on the inputs they just saw: the output must not change; return whether it could be checked.

    Done once for each kind of call, at the price of a skipped step. It finds models whose loops use
    a block's output in ways that no argument of a later block shows. It relies on forecasts being
    exact at the step they were made from. Numbers that are not finite tell nothing. Raises
    AttachError if the output changes, or the model cannot run with its blocks skipped.
    """
    if any(leaf.is_meta for leaf in leaves(out)):
        return True  # shapes without values, of which only the bytes are asked
    if frame.setup.site is not Site.MODEL and not all(_is_finite(leaf) for leaf in leaves(out)):
        return False
    try:
        _check(frame, call, out, frame.setup.site)
    except AttachError:
        attempts = ATTEMPTS[1:]  # it was laid out as the first one
        try:
            _attempt(frame, trace, (call, out), frame.setup.parts, attempts)
        except AttachError as refusal:
            way_out = _way_out(frame, trace, (call, out))
            where = f"{frame.setup.anatomy.model} at site {frame.setup.site!r}"
            raise AttachError(f"{where}: {refusal}; {way_out}") from refusal.__cause__
    return True


def _attempt(
    frame: Frame, trace: Trace, seen: tuple[Any, Any], parts: Combine, attempts: tuple[tuple[str, bool], ...]
) -> None:
    """Lay out parts in several ways until one is exact; raise the last AttachError otherwise."""
    call, out = seen
    for live, protected in attempts:
        layout = frame.layout = lay_out(frame.setup, trace, parts, live)
        if protected:
            protect_all(layout)
        try:
            again(frame, layout.compute, call)
            return _check(frame, call, out, Site.of(parts.site))
        except AttachError as refusal:
            last = refusal
    raise last


def _way_out(frame: Frame, trace: Trace, seen: tuple[Any, Any]) -> str:
    """Return which other sites serve a model that is refused at one; they are tried."""
    serving = []
    setup, parts = frame.setup, frame.setup.parts
    for site in (Site.STACK, Site.BLOCK, Site.MODEL):
        if site is setup.site or (parts.when.sites and site is not Site.BLOCK):
            continue
        feature = "residual" if parts.feature in ("change", "guidance") else parts.feature
        other = replace(parts, site=site, blocks=(), feature=feature)
        try:
            _attempt(frame, trace, seen, other, ATTEMPTS)
        except Exception:  # whatever it is, this site does not serve
            continue
        serving.append(site)
    inside = not parts.when.waits and not parts.lead and not parts.tail
    if inside and setup.anatomy.supports(Site.MODULE):
        serving.append(Site.MODULE)
    if not serving:
        return "no other site of this method serves it either; use another denoiser or method"
    return use_sites(setup.method, serving)


def lay_out(setup: Setup, trace: Trace, parts: Combine, live: str = "mixed") -> Layout:
    """Return the layout of a method's parts over a traced call."""
    return plan(parts, trace, setup.blocks, setup.anatomy.is_unet, live)


def _check(frame: Frame, call: tuple[Any, Any], out: Any, site: Site) -> None:
    """Raise AttachError if skipping the blocks changes the output."""
    assert frame.layout is not None
    check = Frame(frame.setup, frame.call, frame.state)
    check.computes, check.layout, check.instead = False, frame.layout, frame.instead
    check.random = frame.random
    try:
        found = leaves(again(check, frame.layout.skip, call))
    except Exception as failure:
        raise AttachError(f"it fails with its blocks skipped ({failure})") from failure
    if site is Site.MODEL:
        return  # the output is replaced whatever the blocks did
    for expected, value in zip(leaves(out), found, strict=True):
        if not expected.numel() and value.shape == expected.shape:
            continue
        expected, value = expected.detach(), value.detach().float()
        error = float((value - expected.float()).abs().max())
        scale = float(expected.float().abs().max())
        if not error <= _TOLERANCE[expected.dtype.itemsize] * scale:
            raise AttachError(
                f"skipping its blocks on inputs they just saw changes the output by {error:.2g} of "
                f"{scale:.2g}, so its forward uses their outputs in a way that cannot be seen"
            )


def _is_finite(leaf: Tensor) -> bool:
    return bool(leaf.detach().float().isfinite().all())

"""Learn a kind of call: its wiring from a traced forward; a check that skipping is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from diffcache.attach.reuse.frame import Frame
from diffcache.attach.reuse.gated import main_stream
from diffcache.attach.reuse.layout import Layout
from diffcache.attach.reuse.modulated_probe import PlainTap, UnwatchedTap
from diffcache.attach.reuse.plan import keep, plan, protect_all
from diffcache.attach.reuse.rerun import again, leave_loose, reach_of
from diffcache.attach.reuse.setup import Setup, use_sites
from diffcache.attach.reuse.trace import Trace
from diffcache.attach.signature import writes_cache
from diffcache.attach.tap import Tap
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site

# How spans are laid out, in turn: as seen; then for loops that write to their streams in place,
# their additions live; then for loops that do more to the streams than add to them, with what they
# did in the features. The second of each: whether tensors that are held or handed out are copied.
ATTEMPTS = (("mixed", False), ("all", True), ("none", False), ("none", True))
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}  # by bytes of a number, relative to the largest


def learn(frame: Frame, trace: Trace, call: tuple[Any, Any]) -> None:
    """Lay out the method over what the traced call showed, and keep that call's features.

    Args:
        frame: The frame of the traced call.
        trace: Record of that call.
        call: Its positional and keyword arguments.

    Raises:
        AttachError: If no chain of blocks ran or no block would be skipped.
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
            key: [PlainTap(b) if key in layout.streams else UnwatchedTap(b) for b in group]
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
    """Skip the blocks on the very inputs they just saw: the output must not change.

    Done once for each kind of call, at the price of a skipped step. It finds models whose loops
    use a block's output in ways that no argument of a later block shows. It relies on forecasts
    being exact at the step they were made from.

    Returns:
        Whether it could be checked: numbers that are not finite tell nothing.

    Raises:
        AttachError: If the output changes, or the model cannot run with its blocks skipped.
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
    frame: Frame,
    trace: Trace,
    seen: tuple[Any, Any],
    parts: Combine,
    attempts: tuple[tuple[str, bool], ...],
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
        feature = "residual" if parts.feature == "change" else parts.feature
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

"""Learning a kind of call: its wiring from a traced forward; a check that skipping is exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffcache.attach.advice import use_sites
from diffcache.attach.again import again
from diffcache.attach.chain import leave_loose
from diffcache.attach.frame import Frame, main_stream
from diffcache.attach.layout import Layout, keep, plan
from diffcache.attach.peek import PlainTap, UnwatchedTap, look
from diffcache.attach.reach import reach_of
from diffcache.attach.signature import writes_cache
from diffcache.attach.trace import Trace
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.step import Site

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine

# How spans are laid out, in turn: as seen; then for loops that write to their streams in place,
# their additions live; then for loops that do more to the streams than add to them, with what they
# did in the features. The second of each: whether tensors that are held or handed out are copied.
ATTEMPTS = (("mixed", False), ("all", True), ("none", False), ("none", True))
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}  # by bytes of a number, relative to the largest


def learn(engine: Engine, frame: Frame, trace: Trace, call: tuple[Any, Any]) -> None:
    """Lay out the method over what the traced call showed, and keep that call's features.

    Args:
        engine: The engine of the denoiser.
        frame: The frame of the traced call.
        trace: What it recorded.
        call: Its positional and keyword arguments.

    Raises:
        AttachError: If no chain of blocks ran or no block would be skipped.
    """
    if not trace.calls:
        raise AttachError(f"{engine.anatomy.model}: no block of its lists ran; nothing to cache")
    if not writes_cache(call[1]):
        leave_loose(engine, frame, trace, call)
        trace.reach = reach_of(engine, frame, trace, call)
    layout = lay_out(engine, trace, engine.parts)
    frame.layout = layout
    if not keep(frame, layout, trace.calls):
        again(engine, frame, layout.compute, call)
    when = engine.parts.when
    if engine.peek is not None:
        items = {
            key: [PlainTap(b) if key in layout.streams else UnwatchedTap(b) for b in group]
            for key, group in engine.taps.blocks.items()
        }
        probe = again(engine, frame, items, call, partial(look, engine))
        if frame.decides:
            frame.decide(probe)
    elif frame.decides and when.probe is not None:
        places = {(traced.list_key, traced.index): traced for traced in trace.calls}
        first, last = places[layout.lead_calls[0]], places[layout.lead_calls[-1]]
        argument = main_stream(layout, first.list_key)[0]
        number = main_stream(layout, last.list_key)[1]
        frame.decide(frame.probe_of(first.arguments[argument], last.outputs[number]))


def verify(engine: Engine, frame: Frame, trace: Trace, call: tuple[Any, Any], out: Any) -> bool:
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
    if engine.site is not Site.MODEL and not all(_is_finite(leaf) for leaf in leaves(out)):
        return False
    try:
        _check(engine, frame, call, out, engine.site)
    except AttachError:
        attempts = ATTEMPTS[1:]  # it was laid out as the first one
        try:
            _attempt(engine, frame, trace, (call, out), engine.parts, attempts)
        except AttachError as refusal:
            way_out = _way_out(engine, frame, trace, (call, out))
            where = f"{engine.anatomy.model} at site {engine.site!r}"
            raise AttachError(f"{where}: {refusal}; {way_out}") from refusal.__cause__
    return True


def _attempt(
    engine: Engine,
    frame: Frame,
    trace: Trace,
    seen: tuple[Any, Any],
    parts: Combine,
    attempts: tuple[tuple[str, bool], ...],
) -> None:
    """Lay out parts in several ways until one is exact; raise the last AttachError otherwise."""
    call, out = seen
    for live, protected in attempts:
        layout = frame.layout = lay_out(engine, trace, parts, live)
        if protected:
            layout.protect()
        try:
            again(engine, frame, layout.compute, call)
            return _check(engine, frame, call, out, Site.of(parts.site))
        except AttachError as refusal:
            last = refusal
    raise last


def _way_out(engine: Engine, frame: Frame, trace: Trace, seen: tuple[Any, Any]) -> str:
    """Return which other sites serve a model that is refused at one; they are tried."""
    serving = []
    parts = engine.parts
    for site in (Site.STACK, Site.BLOCK, Site.MODEL):
        if site is engine.site or (parts.when.sites and site is not Site.BLOCK):
            continue
        feature = "residual" if parts.feature == "change" else parts.feature
        other = replace(parts, site=site, blocks=(), feature=feature)
        try:
            _attempt(engine, frame, trace, seen, other, ATTEMPTS)
        except Exception:  # whatever it is, this site does not serve
            continue
        serving.append(site)
    inside = parts.when.probe is None and not parts.lead and not parts.tail
    if inside and engine.anatomy.supports(Site.MODULE):
        serving.append(Site.MODULE)
    if not serving:
        return "no other site of this method serves it either; use another denoiser or method"
    return use_sites(engine.method, serving)


def lay_out(engine: Engine, trace: Trace, parts: Combine, live: str = "mixed") -> Layout:
    """Return the layout of a method's parts over a traced call."""
    return plan(parts, trace, engine.taps.blocks, engine.anatomy.is_unet, live)


def _check(engine: Engine, frame: Frame, call: tuple[Any, Any], out: Any, site: Site) -> None:
    """Raise AttachError if skipping the blocks changes the output."""
    assert frame.layout is not None
    check = Frame(engine, frame.timeline, frame.branch, frame.step)
    check.computes, check.layout, check.instead = False, frame.layout, frame.instead
    check.random = frame.random
    try:
        found = leaves(again(engine, check, frame.layout.skip, call))
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

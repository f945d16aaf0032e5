"""Learning a kind of call: its wiring from a traced forward; a check that skipping is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffcache.attach.frame import Frame, main_stream
from diffcache.attach.layout import Layout, keep, plan
from diffcache.attach.peek import PlainTap, look
from diffcache.attach.tap import FRAME
from diffcache.attach.trace import Trace
from diffcache.attach.tree import leaves, unshared
from diffcache.errors import AttachError
from diffcache.step import Site

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine

_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}  # by bytes of a number, relative to the largest


def learn(engine: Engine, frame: Frame, trace: Trace, call: tuple[Any, Any]) -> None:
    """Lay out the method over what the traced call showed, and keep that call's features.

    Args:
        engine: The engine of the denoiser.
        frame: The frame of the traced call.
        trace: What it recorded.
        call: Its positional and keyword arguments.

    Raises:
        AttachError: If no block ran or none would be skipped.
    """
    if not trace.calls:
        raise AttachError(f"{engine.anatomy.model}: no block of its lists ran; nothing to cache")
    layout = lay_out(engine, trace)
    frame.layout = layout
    if not keep(frame, layout, trace.calls):
        _again(engine, frame, layout.compute, call)
    when, lead = engine.parts.when, trace.calls[: engine.parts.lead]
    if frame.decides and engine.peek is not None:
        frame.items = {
            key: [PlainTap(block) for block in group] for key, group in engine.taps.blocks.items()
        }
        args, kwargs = unshared(call)
        token = FRAME.set(frame)
        try:
            frame.decide(look(engine, engine.model.forward, args, kwargs))
        finally:
            FRAME.reset(token)
    elif frame.decides and when.probe is not None:
        argument = main_stream(layout, lead[0].list_key)[0]
        number = main_stream(layout, lead[-1].list_key)[1]
        frame.decide(frame.probe_of(lead[0].arguments[argument], lead[-1].outputs[number]))
    tally: dict[str, list[float | None]] = {}
    for traced in trace.calls:
        tally.setdefault(traced.list_key, []).append(traced.flops)
    layout.flops = means(tally)


def verify(engine: Engine, frame: Frame, trace: Trace, call: tuple[Any, Any], out: Any) -> None:
    """Skip the blocks on the very inputs they just saw: the output must not change.

    Done once for each kind of call, at the price of a skipped step. It finds models whose loops
    use a block's output in ways that no argument of a later block shows. It relies on forecasts
    being exact at the step they were made from.

    Raises:
        AttachError: If the output changes, or the model cannot run with its blocks skipped.
    """
    # As laid out; then for loops that write to their streams in place, their additions live; then
    # for loops that do more to the streams than add to them, with what they did in the features.
    attempts = [("all", True), ("none", False), ("none", True)]
    while True:
        try:
            return _check(engine, frame, call, out)
        except AttachError:
            if not attempts:
                raise
        live, protected = attempts.pop(0)
        layout = lay_out(engine, trace, live)
        if protected:
            layout.protect()
        assert frame.layout is not None
        layout.flops, frame.layout = frame.layout.flops, layout
        _again(engine, frame, layout.compute, call)


def lay_out(engine: Engine, trace: Trace, live: str = "mixed") -> Layout:
    """Return the layout of the engine's method over a traced call."""
    return plan(
        engine.parts, trace.calls, trace.wirings(), engine.taps.blocks, engine.anatomy.is_unet, live
    )


def _check(engine: Engine, frame: Frame, call: tuple[Any, Any], out: Any) -> None:
    """Raise AttachError if skipping the blocks changes the output."""
    assert frame.layout is not None
    check = Frame(engine, frame.timeline, frame.branch, frame.step)
    check.computes, check.layout, check.instead = False, frame.layout, frame.instead
    where = f"{engine.anatomy.model} at site {engine.site!r}"
    advice = "use site='block' or site='model'"
    try:
        found = leaves(_again(engine, check, frame.layout.skip, call))
    except Exception as failure:
        raise AttachError(
            f"{where}: it fails with its blocks skipped ({failure}); {advice}"
        ) from failure
    if engine.site is Site.MODEL:
        return  # the output is replaced whatever the blocks did
    for expected, value in zip(leaves(out), found, strict=True):
        value, expected = value.detach().float(), expected.detach()
        error = float((value - expected.float()).abs().max())
        scale = float(expected.float().abs().max())
        if not error <= _TOLERANCE[expected.dtype.itemsize] * scale:
            raise AttachError(
                f"{where}: skipping its blocks on inputs they just saw changes the output by "
                f"{error:.2g} of {scale:.2g}, so its forward uses their outputs in a way that "
                f"cannot be seen; {advice}"
            )


def _again(engine: Engine, frame: Frame, items: dict[str, list[Any]], call: Any) -> Any:
    """Run the denoiser once more under a frame, with other items."""
    frame.items = items
    token = FRAME.set(frame)
    try:
        args, kwargs = unshared(call)
        return engine.model.forward(*args, **kwargs)
    finally:
        FRAME.reset(token)


def means(
    tally: dict[str, list[float | None]], evaluations: dict[str, int] | None = None
) -> dict[str, float] | None:
    """Return the mean operations of one evaluation of every site, None if one was not counted.

    Args:
        tally: Site -> operations of the modules that ran for it.
        evaluations: Site -> evaluations; None where each module is one.
    """
    means: dict[str, float] = {}
    for key, values in tally.items():
        counts = [value for value in values if value is not None]
        if len(counts) != len(values):
            return None
        means[key] = sum(counts) / (len(counts) if evaluations is None else evaluations[key])
    return means

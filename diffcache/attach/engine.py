"""Runs one method on one denoiser: opens a frame at every call and closes it again."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffcache.attach.anatomy import Anatomy
from diffcache.attach.anchor import claim, owner_of, release
from diffcache.attach.clock import Branch, Run
from diffcache.attach.context import current_context
from diffcache.attach.frame import Frame, gated_items, main_stream
from diffcache.attach.layout import Layout, keep, plan
from diffcache.attach.module import EmptyTap, ModuleTap
from diffcache.attach.record import Call
from diffcache.attach.signature import conditions_of, signature_of
from diffcache.attach.span import OWN, Held, estimates, hold
from diffcache.attach.tap import FRAME, Tap, tap_children, tap_list, untap_children, untap_list
from diffcache.attach.trace import Trace
from diffcache.attach.tree import Template, leaves
from diffcache.errors import AttachError, CacheWarning
from diffcache.features.base import FeatureMethod
from diffcache.features.instead import Reuse
from diffcache.step import Site

if TYPE_CHECKING:
    from diffcache.attach.handle import Handle

OUTPUT = ("output", 0)  # where the MODEL site keeps its feature
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}  # by bytes of a number, relative to the largest


class SingleTap(Tap):
    """A block that is no member of a list, such as a UNet's middle."""

    __slots__ = ("key",)

    def __init__(self, module: nn.Module, key: str) -> None:
        super().__init__(module)
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame: Frame = FRAME.get()  # type: ignore[assignment]
        items = frame.items.get(self.key)
        return (self.module if items is None else items[0])(*args, **kwargs)


class Engine:
    """One method on one denoiser.

    Args:
        handle: What `wrap` returned for the pipeline or the model.
        name: Name of the denoiser in its pipeline.
        model: The denoiser.
        method: The method.
        anatomy: The denoiser's anatomy.

    Raises:
        AttachError: If the model has nothing at the method's site.
    """

    def __init__(
        self, handle: Handle, name: str, model: nn.Module, method: FeatureMethod, anatomy: Anatomy
    ) -> None:
        self.handle, self.name, self.model = handle, name, model
        self.method, self.parts, self.anatomy = method, method.parts(), anatomy
        self.layouts: dict[Any, Layout] = {}
        self.blocks: dict[str, list[nn.Module]] = {}
        self.flops: dict[Any, dict[str, float] | None] = {}
        self._arguments = list(inspect.signature(type(model).forward).parameters)[1:]
        self.module_items: dict[str, list[Any]] = {}
        self._parents: list[nn.Module] = []
        self._lists: list[nn.ModuleList] = []
        site = self.site = Site.of(self.parts.site)
        if not anatomy.supports(site):
            raise AttachError(
                f"{anatomy.model} has no {site.value} modules inside its blocks; "
                "use site='stack' or site='block'"
            )
        self._tap_modules(site) if site.is_module else self._tap_lists()
        pre = model.register_forward_pre_hook(open_frame, prepend=True, with_kwargs=True)
        post = model.register_forward_hook(close_frame, with_kwargs=True, always_call=True)
        self._hooks = (pre, post)
        claim(model, self)

    def _tap_lists(self) -> None:
        for entry in self.anatomy.lists:
            blocks = self.model.get_submodule(entry.key)
            assert isinstance(blocks, nn.ModuleList)
            self.blocks[entry.key] = list(blocks)
            self._tap_list(blocks, entry.key)
        for key in self.anatomy.singles:
            module = self.model.get_submodule(key)
            self.blocks[key] = [module]
            self._tap_children(self.model, {key: SingleTap(module, key)})

    def _tap_modules(self, site: Site) -> None:
        for entry in self.anatomy.modules_at(site):
            parent = self.model.get_submodule(entry.parent)
            module = parent.get_submodule(entry.child)
            name = f"{entry.parent}.{entry.child}"
            inside_list = isinstance(parent, nn.ModuleList)
            group = f"{entry.list_key}.{entry.kind if inside_list else entry.child}"
            tap: Tap = EmptyTap(module, name) if entry.kind == "empty" else ModuleTap(module, name, group)
            if isinstance(parent, nn.ModuleList):
                if entry.parent not in self.module_items:
                    self.module_items[entry.parent] = list(parent)
                    self._tap_list(parent, entry.parent)
                self.module_items[entry.parent][int(entry.child)] = tap
            else:
                self._tap_children(parent, {entry.child: tap})

    def _tap_list(self, blocks: nn.ModuleList, key: str) -> None:
        self._lists.append(blocks)
        tap_list(blocks, self, key)

    def _tap_children(self, parent: nn.Module, taps: dict[str, Tap]) -> None:
        if not any(parent is known for known in self._parents):
            self._parents.append(parent)
        tap_children(parent, self, taps)

    def detach(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()
        for blocks in self._lists:
            untap_list(blocks)
        for parent in self._parents:
            untap_children(parent)
        release(self.model)

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the tensors that this denoiser's features hold in a run."""
        timeline = run.timelines.get(self)
        if timeline is None:
            return
        instead = self.parts.instead
        for branch in timeline.branches:
            for held in branch.features.values():
                for state in held.states:
                    yield from instead.held(state)
        if timeline.when_state is not None:
            yield from self.parts.when.held(timeline.when_state)

    # one call ------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """Start the frame of a denoiser call: which step and branch it is, and what will run."""
        anatomy = self.anatomy
        timestep = kwargs.get(anatomy.timestep) if anatomy.timestep else None
        if timestep is None:
            args, kwargs, timestep = self._named(args, kwargs)
        run = self.handle.run()
        timeline = run.timeline(self)
        context = current_context(self.model)
        if timeline.arrive(context, timestep) and timeline.index == 0:
            timeline.when_state = self.parts.when.init()
            if not run.in_pipeline:
                self.handle.new_record(run)
        signature = signature_of(args, kwargs, anatomy.timestep)
        branch = timeline.branch_of(
            context, signature, lambda: conditions_of(args, kwargs, anatomy.timestep)
        )
        frame = Frame(self, timeline, branch, timeline.step(branch.number))
        reason = self._must_compute(timeline, branch, signature, kwargs)
        self._decide(frame, reason)
        if branch.signature != signature:
            branch.signature, branch.layout = signature, self.layouts.get(signature)
        self._hand_out(frame)
        label = branch.name or branch.number
        frame.call = Call(self.name, timeline.index, timeline.timestep, label, True, reason)
        return frame

    def _named(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return a call with its positional arguments named, and its timestep."""
        kwargs = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        return (), kwargs, kwargs.get(self.anatomy.timestep or "")

    def _must_compute(self, timeline: Any, branch: Any, signature: Any, kwargs: Any) -> str:
        """Return why this branch cannot be skipped, an empty string if it can."""
        if branch.anchor is None:
            return "first call"
        if branch.signature != signature:
            return "inputs changed"
        if branch.anchor < timeline.last_computed < timeline.index:
            return "missed a step"
        return "writes a KV cache" if _writes_cache(kwargs) else ""

    def _decide(self, frame: Frame, reason: str) -> None:
        """Decide now where the probe is not needed; a forced first branch decides for all."""
        timeline, when = frame.timeline, self.parts.when
        frame.decides = timeline.decided_at != frame.step.index
        if not frame.decides:
            frame.computes = timeline.computes or bool(reason)
        elif reason:
            frame.computes = True
        if frame.decides and when.probe is None:
            frame.decide(None)

    def _hand_out(self, frame: Frame) -> None:
        """Choose what stands for the blocks in this call."""
        if self.site.is_module:
            frame.tally = None if frame.branch.signature in self.flops else {}
            frame.items = self.module_items
            return
        layout = frame.layout = frame.branch.layout
        if layout is None:
            frame.computes = True
            spread = self.site in (Site.BLOCK, Site.RUN)
            keep_all = spread or self.parts.tail > 0 or self.anatomy.is_unet
            frame.trace = Trace(keep_all, self.parts.lead)
            frame.items = {key: frame.trace.items(key, group) for key, group in self.blocks.items()}
        elif frame.decides and self.parts.when.probe is not None:
            frame.items = gated_items(layout, self.blocks)
        elif frame.computes:
            frame.items = layout.compute
        else:
            frame.items = layout.skip if frame.decides else layout.follow

    def close(self, frame: Frame, args: Any, kwargs: Any, out: Any) -> Any:
        """Finish a denoiser call; return what it returns if the method replaces it."""
        layout, branch = frame.layout, frame.branch
        if frame.trace is not None:
            layout = frame.layout = self._learn(frame, frame.trace, (args, kwargs))
            if not _writes_cache(kwargs):
                self._verify(frame, layout, (args, kwargs), out)
        replaced = None
        if self.site is Site.MODEL:
            replaced = self._at_output(frame, out)
        elif not frame.computes and layout is not None and frame.closed != layout.closes:
            raise AttachError(
                f"{self.anatomy.model}: {frame.closed} of {layout.closes} skipped spans ended; its "
                "forward left out blocks that it ran when its wiring was learned; use site='model'"
            )
        if frame.computes:
            branch.anchor = frame.step.index
        self._account(frame, layout)
        return replaced

    def _learn(self, frame: Frame, trace: Trace, call: tuple[Any, Any]) -> Layout:
        """Lay out the method over what the traced call showed, and keep that call's features."""
        wirings = trace.wirings()
        if not wirings:
            raise AttachError(f"{self.anatomy.model}: no block of its lists ran; nothing to cache")
        layout = plan(self.parts, trace.calls, wirings, self.blocks, self.anatomy.is_unet)
        if not keep(frame, layout, trace.calls):
            self._again(frame, layout.compute, call)
        if frame.decides and self.parts.when.probe is not None:
            lead = trace.calls[: self.parts.lead]
            argument, number = main_stream(layout, lead[0].list_key)
            number = main_stream(layout, lead[-1].list_key)[1]
            frame.decide(frame.probe_of(lead[0].arguments[argument], lead[-1].outputs[number]))
        self.layouts[frame.branch.signature] = frame.branch.layout = layout
        tally: dict[str, list[float | None]] = {}
        for traced in trace.calls:
            tally.setdefault(traced.list_key, []).append(traced.flops)
        self.flops[frame.branch.signature] = _means(tally)
        return layout

    def _again(self, frame: Frame, items: dict[str, list[Any]], call: tuple[Any, Any]) -> Any:
        """Run the denoiser once more under a frame, with other items."""
        frame.items = items
        token = FRAME.set(frame)
        try:
            return self.model.forward(*call[0], **call[1])
        finally:
            FRAME.reset(token)

    def _verify(self, frame: Frame, layout: Layout, call: tuple[Any, Any], out: Any) -> None:
        """Skip the blocks on the very inputs they just saw: the output must not change.

        Done once for each kind of call, at the price of a skipped step. It finds models whose
        loops use a block's output in ways that no argument of a later block shows.

        Raises:
            AttachError: If the output changes.
        """
        check = Frame(self, frame.timeline, Branch(-1, None, {}), frame.step)
        check.instead, check.computes = Reuse(), True
        check.layout = layout
        if self.site is Site.MODEL:
            return  # the output is replaced whatever the blocks did
        self._again(check, layout.compute, call)
        check.computes = False
        found = leaves(self._again(check, layout.skip, call))
        for expected, value in zip(leaves(out), found, strict=True):
            error = (value.float() - expected.float()).abs().max()
            scale = expected.float().abs().max()
            if not error <= _TOLERANCE[expected.dtype.itemsize] * scale:
                raise AttachError(
                    f"{self.anatomy.model} at site {self.parts.site!r}: skipping its blocks on inputs "
                    f"they just saw changes the output by {float(error):.2g} of {float(scale):.2g}, "
                    "so its forward uses their outputs in a way that cannot be seen; use "
                    "site='block' or site='model'"
                )

    def _at_output(self, frame: Frame, out: Any) -> Any:
        """Keep the denoiser's output, or replace it by its estimate."""
        if frame.computes:
            own = [leaf.detach().clone() for leaf in leaves(out)]
            hold(frame, OUTPUT, own, [OWN] * len(own), Template(out))
            return None
        held: Held = frame.branch.features[OUTPUT]
        return held.template.build(estimates(frame, held))

    def _account(self, frame: Frame, layout: Layout | None) -> None:
        """Note what the call computed and skipped."""
        call = frame.call
        assert call is not None
        call.computed = bool(frame.computes)
        call.reason = call.reason or "method"
        if layout is None:
            counts: dict[str, list[int]] = {}
            for tap, visits in frame.visits.items():
                ran = counts.setdefault(tap.group, [0, 0])
                ran[0 if frame.computes else 1] += visits
            call.counts = {key: (ran, skipped) for key, (ran, skipped) in counts.items()}
            if frame.tally is not None:
                self.flops[frame.branch.signature] = _means(frame.tally)
        elif frame.computes:
            call.counts = {key: (ran, 0) for key, ran in layout.totals.items()}
        else:
            follows = not frame.decides
            call.counts = layout.follow_counts if follows else layout.counts
        flops = self.flops.get(frame.branch.signature)
        if flops is not None:
            call.flops = (
                sum(flops[key] * ran for key, (ran, _) in call.counts.items()),
                sum(flops[key] * skipped for key, (_, skipped) in call.counts.items()),
            )
        call.seconds = time.perf_counter() - frame.started
        self.handle.note(frame, call)


def _writes_cache(kwargs: dict[str, Any]) -> bool:
    """Return whether a call may write to a KV cache it was given; such blocks are never skipped."""
    given = {n: v for n, v in kwargs.items() if "kv_cache" in n and v is not None}
    modes = [value for value in given.values() if isinstance(value, str)]
    flags = [flag for v in given.values() if isinstance(v, dict) for flag in v.values()]
    if modes:
        return any(mode not in ("cached", "read") for mode in modes)
    if any(isinstance(flag, bool) for flag in flags):
        return any(flag is True for flag in flags)
    return bool(given)


def _means(tally: dict[str, list[float | None]]) -> dict[str, float] | None:
    """Return the mean operations of one evaluation of every site, None if one was not counted."""
    means: dict[str, float] = {}
    for key, values in tally.items():
        counts = [value for value in values if value is not None]
        if len(counts) != len(values):
            return None
        means[key] = sum(counts) / len(counts)
    return means


def open_frame(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a wrapped denoiser; does nothing on a copy of one."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # this runs outside of any graph
    engine = owner_of(module)
    if engine is None:
        _orphan(module)
        return
    frame = engine.open(args, kwargs)
    frame.token = FRAME.set(frame)


def close_frame(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """Forward hook of a wrapped denoiser, called after exceptions as well."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    engine = owner_of(module)
    frame = FRAME.get()
    if engine is None or frame is None or frame.engine is not engine:
        return None
    FRAME.reset(frame.token)
    if out is None:  # an exception is on its way
        engine.handle.abandon()
        return None
    return engine.close(frame, args, kwargs, out)


def _orphan(module: nn.Module) -> None:
    """Take the hooks off a copy of a wrapped model and say that it runs uncached."""
    for hooks, hook in ((module._forward_pre_hooks, open_frame), (module._forward_hooks, close_frame)):
        for key in [key for key, value in hooks.items() if value is hook]:
            del hooks[key]
    warnings.warn(
        f"this {type(module).__name__} is a copy of a wrapped one and runs uncached; wrap it too",
        CacheWarning,
        stacklevel=4,
    )



"""Runs one method on one denoiser: opens a frame at every call and closes it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from diffcache.attach.account import account
from diffcache.attach.advice import use_sites
from diffcache.attach.again import Random
from diffcache.attach.anatomy import Anatomy
from diffcache.attach.anchor import claim, release
from diffcache.attach.branches import told_branch
from diffcache.attach.clock import Branch, Run, Timeline
from diffcache.attach.conditions import other_shape
from diffcache.attach.context import current_context
from diffcache.attach.deep import split
from diffcache.attach.extension import Extension, install
from diffcache.attach.facts import facts_of
from diffcache.attach.frame import Frame, gated_items
from diffcache.attach.hooks import close_frame, open_frame
from diffcache.attach.install import Taps
from diffcache.attach.latest import Latest
from diffcache.attach.layout import Layout
from diffcache.attach.learn import learn, verify
from diffcache.attach.output import keep_output, stand_in
from diffcache.attach.peek import Peek
from diffcache.attach.peers import check_alone
from diffcache.attach.record import Call
from diffcache.attach.signature import conditions_of, signature_of, writes_cache
from diffcache.attach.time_peek import time_peek
from diffcache.attach.trace import Trace
from diffcache.attach.tree import unshared
from diffcache.errors import AttachError
from diffcache.features.base import FeatureMethod
from diffcache.features.hold import Hold
from diffcache.step import Site

if TYPE_CHECKING:
    from diffcache.attach.handle import Handle

KINDS = 32  # kinds of calls that are remembered; a run rarely has more than a few


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
        self.method, self.parts = method, method.parts()
        self.site = Site.of(self.parts.site)
        if self.site is Site.DEEP:
            anatomy, self.parts = split(model, anatomy, self.parts)
        self.anatomy = anatomy
        self.instead = self.parts.instead
        self.hold = self.instead if isinstance(self.instead, Hold) else None
        self.layouts: Latest[Layout] = Latest(KINDS)
        self.costs: Latest[dict[str, float | None]] = Latest(KINDS)  # of module sites
        self.is_noticed = False  # whether it was said that the forward is called directly
        self._arguments = list(inspect.signature(type(model).forward).parameters)[1:]
        self._has_cache = any("kv_cache" in name for name in self._arguments)
        if not anatomy.supports(self.site):
            fused = any("TransformerEncoderLayer" in entry.classes for entry in anatomy.lists)
            why = " (layers of nn.TransformerEncoder run as one fused operation)" if fused else ""
            raise AttachError(
                f"{anatomy.model} has nothing at site {self.site!r} inside its blocks{why}; "
                + use_sites(method, [Site.STACK, Site.BLOCK])
            )
        method.check_model(facts_of(model, handle.scheduler))
        self.total = self.parts.when.total or method.total
        self.apart = frozenset(self.parts.when.sites)
        anatomy.check_sites(self.parts)
        probe = self.parts.when.probe
        self.peek = Peek(model, anatomy) if probe == "modulated" else time_peek(model, probe)
        self.taps = Taps(self, model, anatomy, self.site)
        self.extensions: list[Extension] = []
        try:
            for ability in method.abilities():
                self.extensions.append(install(self, ability))
        except BaseException:
            self._remove()
            raise
        pre = model.register_forward_pre_hook(open_frame, prepend=True, with_kwargs=True)
        post = model.register_forward_hook(close_frame, with_kwargs=True, always_call=True)
        self._hooks = (pre, post)
        claim(model, self)

    def detach(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()
        self._remove()
        release(self.model)

    def _remove(self) -> None:
        for extension in reversed(self.extensions):
            extension.remove()
        self.extensions = []
        self.taps.remove()
        if self.peek is not None:
            self.peek.remove()

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the tensors that this denoiser's features hold in a run."""
        timeline = run.timelines.get(self)
        if timeline is None:
            return
        instead = self.instead
        for branch in list(timeline.branches):  # other threads go on while they are counted
            for held in list(branch.features.values()):
                for state in held.states:
                    yield from instead.held(state)
        states = [timeline.when_state, *(branch.when_state for branch in list(timeline.branches))]
        for state in states:
            if state is not None:
                yield from self.parts.when.held(state)

    # one call ------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Frame, Any]:
        """Start the frame of a denoiser call: which step and branch it is, and what will run.

        Returns:
            The frame, and the arguments that the denoiser is given instead, None if they stay.
        """
        given = args, kwargs
        anatomy = self.anatomy
        timestep = kwargs.get(anatomy.timestep) if anatomy.timestep else None
        if timestep is None:
            args, kwargs, timestep = self._named(args, kwargs)
        run = self.handle.run()
        timeline = run.timeline(self)
        context = current_context(self.model)
        sample = kwargs.get(anatomy.sample, args[0] if args else None)
        if timeline.arrive(context, timestep):
            self._check_length(timeline)
            if timeline.index == 0:
                self.start(timeline, sample)
        signature = signature_of(args, kwargs, anatomy.timestep)
        if run.in_pipeline:
            branch = timeline.branch_of(
                context, signature, lambda: conditions_of(args, kwargs, anatomy.timestep)
            )
        else:
            branch = told_branch(self, timeline, context, signature, (args, kwargs), sample)
        if self.parts.when.by_branch and branch.when_state is None:
            branch.when_state = self.parts.when.init()
        frame = Frame(self, timeline, branch, timeline.step(branch.number))
        reason = self._must_compute(timeline, branch, signature, kwargs)
        self._decide(frame, reason)
        if branch.signature != signature:
            branch.signature, branch.layout = signature, self.layouts.recall(signature)
        frame.apart = bool(self.apart) and not reason
        self._hand_out(frame)
        frame.sample = sample
        for extension in self.extensions:
            given = extension.open(frame, *given) or given
        if frame.trace is not None:
            frame.given, frame.random = unshared(given), Random(given)
        label = branch.name or branch.number
        frame.call = Call(self.name, timeline.index, timeline.timestep, label, True, reason)
        return frame, given if self.extensions else None

    def _check_length(self, timeline: Timeline) -> None:
        """Raise unless the run has as many steps as the method's tables are made for."""
        made_for, has = self.total, timeline.total
        said = timeline.run.steps
        if said is not None and timeline.index >= said:
            raise AttachError(
                f"diffcache.run(..., steps={said}): a step more than that began; say how many "
                "timesteps the run has, or put each sampling run into a `with` of its own"
            )
        if made_for is None:
            return
        found = steps = str(has)
        if has in (None, made_for):  # nobody said how many, or more may come
            if timeline.index < made_for:
                return
            found, steps = "more", "..."
        raise AttachError(
            f"{self.method!r} is made for runs of {made_for} steps, this one has {found}: pass "
            f"num_inference_steps={made_for}, or calibrate with steps={steps}"
        )

    def start(self, timeline: Timeline, sample: Any) -> None:
        """Start a run, whose sample is known."""
        handle, run = self.handle, timeline.run
        check_alone(self.model)
        if not self.parts.when.by_branch:
            timeline.when_state = self.parts.when.init()
        if not run.in_pipeline:
            handle.new_record(run)
        if handle.tables and isinstance(sample, Tensor):
            handle.remark(run, other_shape(handle.tables, sample.shape[1:]))
        if self.taps.refresh():
            self.layouts.clear()

    def _named(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return a call with its positional arguments named, and its timestep."""
        kwargs = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        return (), kwargs, kwargs.get(self.anatomy.timestep or "")

    def _must_compute(
        self, timeline: Timeline, branch: Branch, signature: Any, kwargs: dict[str, Any]
    ) -> str:
        """Return why this branch cannot be skipped, an empty string if it can."""
        if timeline.doubt:
            return timeline.doubt
        if branch.anchor is None:
            return "first call"
        if branch.signature != signature:
            return "inputs changed"
        if branch.anchor < timeline.last_computed < timeline.index:
            return "missed a step"
        if branch.layout is None and not self.site.is_module:
            return "output not finite"  # so that nothing could be learned from it
        return "writes a KV cache" if self._has_cache and writes_cache(kwargs) else ""

    def _decide(self, frame: Frame, reason: str) -> None:
        """Decide now where the probe is not needed; a forced first branch decides for all."""
        when = self.parts.when
        frame.decides = frame.decider.decided_at != frame.step.index
        if not frame.decides:
            frame.computes = frame.decider.computes or bool(reason)
        elif reason:
            frame.computes = True
        if frame.decides and when.probe is None:
            frame.decide(None)

    def _hand_out(self, frame: Frame) -> None:
        """Choose what stands for the blocks in this call."""
        if self.site.is_module:
            whole = frame.computes and not frame.apart
            frame.tally = {} if whole and frame.branch.signature not in self.costs else None
            frame.items = self.taps.module_items
            return
        layout = frame.layout = frame.branch.layout
        if layout is None:
            frame.computes = True
            spread = self.site in (Site.BLOCK, Site.RUN)
            keep_all = spread or self.parts.tail > 0 or self.anatomy.is_unet
            frame.trace = Trace(keep_all, self.parts.lead)
            if self.hold is not None:  # what is learned must be exact, so it is packed afterwards
                frame.branch.features.clear()
                frame.instead = self.hold.inner
            frame.items = {
                key: frame.trace.items(key, group, self.anatomy.opened)
                for key, group in self.taps.blocks.items()
            }
        elif frame.decides and (probe := self.parts.when.probe) is not None:
            frame.items = gated_items(layout, self.taps.blocks, probe)
        elif frame.computes and frame.apart:
            frame.items, frame.mixed = layout.mix(
                frozenset(site for site in layout.sites if not frame.runs(site))
            )
        elif frame.computes:
            frame.items = layout.compute
        else:
            frame.items = layout.skip if frame.decides else layout.follow

    def _learn(self, frame: Frame, trace: Trace, kwargs: dict[str, Any], out: Any) -> None:
        """Lay out the method over a traced call."""
        learn(self, frame, trace, frame.given)
        branch = frame.branch
        if not writes_cache(kwargs) and not verify(self, frame, trace, frame.given, out):
            branch.features.clear()  # the next call is traced again
            return
        assert frame.layout is not None
        self.layouts[branch.signature] = branch.layout = frame.layout
        if self.hold is not None:
            frame.instead = self.hold
            for held in branch.features.values():
                held.states = [self.hold.adopt(state) for state in held.states]

    def close(self, frame: Frame, kwargs: dict[str, Any], out: Any) -> Any:
        """Finish a denoiser call; return what it returns instead, None if that stays.

        Raises:
            AttachError: If the model cannot be cached as asked (found at the first call of a
                kind), or left out blocks that it ran when it was learned.
        """
        layout, branch = frame.layout, frame.branch
        replaced = None
        if frame.trace is not None:
            self._learn(frame, frame.trace, kwargs, out)
            layout = frame.layout
        for extension in self.extensions:
            changed = extension.close(frame, out)
            if changed is not None:
                out = replaced = changed
        if self.site is Site.MODEL and not frame.computes:
            replaced = stand_in(frame)
        elif self.site is Site.MODEL or self.handle.observer is not None:
            seen = keep_output(frame, out)
            replaced = replaced if seen is None else seen
        elif not frame.computes and layout is not None and frame.closed != layout.closes:
            raise AttachError(
                f"{self.anatomy.model}: {frame.closed} of {layout.closes} skipped spans ended; its "
                "forward left out blocks that it ran when its wiring was learned; use site='model'"
            )
        if frame.computes:
            branch.anchor = frame.step.index
        account(self, frame, layout)
        return replaced

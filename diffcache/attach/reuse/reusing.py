"""Feature reuse on one denoiser: decides at every call which blocks run and which are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.reuse.deep import split
from diffcache.attach.reuse.frame import FRAME, Frame, Random
from diffcache.attach.reuse.layout import work_of
from diffcache.attach.reuse.learn import learn, verify
from diffcache.attach.reuse.modulated_probe import Peek
from diffcache.attach.reuse.setup import BranchState, Decision, Setup, use_sites
from diffcache.attach.reuse.span import keep_output, stand_in
from diffcache.attach.reuse.stand_in import gated_items
from diffcache.attach.reuse.taps import Taps
from diffcache.attach.reuse.time_probe import time_peek
from diffcache.attach.reuse.trace import Trace
from diffcache.attach.run import Run, Timeline
from diffcache.attach.signature import writes_cache
from diffcache.attach.tap import ITEMS
from diffcache.attach.tree import leaves, unshared
from diffcache.errors import AttachError
from diffcache.features.combine import Combine, reuse_of
from diffcache.foreign import splits_inputs
from diffcache.step import Site


class FeatureReuse(Extension):
    """Skip blocks of a denoiser, or modules inside them, and stand in for their outputs.

    Args:
        denoiser: The attachment to the network.
        parts: Schedule, stand-in and site.

    Raises:
        AttachError: If the model has nothing at the site.
    """

    def __init__(self, denoiser: Denoiser, parts: Combine) -> None:
        model, anatomy, handle = denoiser.model, denoiser.anatomy, denoiser.handle
        self._has_cache = any("kv_cache" in name for name in denoiser.arguments)
        self._name, self._whole = denoiser.name, handle.method
        site = Site.of(parts.site)
        if site is Site.DEEP:
            anatomy, parts = split(model, anatomy, parts)
        self.setup = setup = Setup(model, anatomy, parts, site, handle.observer, denoiser.method)
        if not anatomy.supports(setup.site):
            fused = any("TransformerEncoderLayer" in entry.classes for entry in anatomy.lists)
            why = " (layers of nn.TransformerEncoder run as one fused operation)" if fused else ""
            raise AttachError(
                f"{anatomy.model} has nothing at site {setup.site!r} inside its blocks{why}; "
                + use_sites(denoiser.method, [Site.STACK, Site.BLOCK])
            )
        anatomy.check_sites(parts)
        denoiser.total = denoiser.total if parts.when.total is None else parts.when.total
        probe = parts.when.probe
        setup.peek = Peek(model, anatomy) if probe == "modulated" else time_peek(model, probe)
        self._taps = Taps(denoiser, model, anatomy, setup.site)
        setup.blocks, setup.module_items = self._taps.blocks, self._taps.module_items

    def remove(self) -> None:
        """Leave the model as it was found."""
        self._taps.remove()
        if self.setup.peek is not None:
            self.setup.peek.remove()

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the tensors of the features, and of the schedules' probes."""
        for timeline in list(run.timelines.values()):  # other threads go on while they are counted
            known = [branch.storage.get(self) for branch in list(timeline.branches)]
            states: list[BranchState] = [state for state in known if state is not None]
            for state in states:
                kept: list[Tensor] = []
                for held in list(state.features.values()):
                    for feature in held.states:
                        kept += state.decision.parts.instead.held(feature)
                yield from kept
                yield from unheld(state.output[1], kept)
            own = timeline.storage.get(self)
            decisions = ([] if own is None else [own]) + [
                state.decision for state in states if state.decision is not own
            ]
            for decision in decisions:
                if decision.state is not None:
                    yield from decision.parts.when.held(decision.state)

    def start(self, timeline: Timeline) -> None:
        """Start a run: nothing is decided; blocks that were replaced are laid out anew.

        Raises AttachError if blocks that may be skipped split their tokens over processes.
        """
        self._check_split()
        parts, asked = self.setup.parts, timeline.run.record.method
        if asked is not None and asked is not self._whole:  # `diffcache.settings` gave this run a method of its own
            chosen = reuse_of(asked.for_denoiser(self._name))
            assert chosen is not None
            parts = replace(parts, when=chosen.when, instead=chosen.instead)
        state = None if parts.when.by_branch else parts.when.init()
        timeline.storage[self] = Decision(parts, state)
        if self._taps.refresh():
            self.setup.layouts.clear()

    def _check_split(self) -> None:
        """Raise if a skipped block would leave out that its tokens are split over processes."""
        setup = self.setup
        if setup.is_module or setup.site is Site.MODEL:
            return
        for key, blocks in setup.blocks.items():
            if any(map(splits_inputs, blocks)):
                raise AttachError(
                    f"{setup.anatomy.model}: enable_parallelism splits tokens as blocks of {key} "
                    "are called, so that one that is skipped would get all of them; "
                    + use_sites(setup.method, [Site.MODEL, Site.MODULE])
                )

    # one call ------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Decide which blocks run, where no probe is needed, and hand out the items of the call."""
        if call.writes:
            return call
        setup, record = self.setup, call.record
        state: BranchState = call.branch.storage.get(self) or self._new_state(call)
        first = next(iter(call.timeline.branches), None)  # a call in doubt may come before any
        leader = first.storage.get(self) if first is not None and first.number == 0 else None
        frame = call.storage[FRAME] = Frame(setup, call, state, leader)
        reason = record.reason = self.must_compute(call, state)
        decision = state.decision
        frame.decides = decision.index != call.step.index
        if not frame.decides:  # another branch decided this step for all, even if it was forced to compute
            frame.computes = decision.computes or bool(reason)
        elif reason:
            frame.computes = True
        if frame.decides and not setup.waits:
            shown = setup.probe == "sample" and isinstance(call.sample, Tensor)
            frame.decide(call.sample if shown else None)
        if call.branch.signature != call.signature:
            state.layout = setup.layouts.recall(call.signature)
        frame.per_site = bool(setup.own_sites) and not reason
        call.storage[ITEMS] = self._items(frame)
        record.computed = frame.computes
        return call if frame.trace is None else replace(call, learns=True)

    def _new_state(self, call: Call) -> BranchState:
        """Return the new state of the branch of a call, its first."""
        own: Decision = call.timeline.storage[self]
        if own.parts.when.by_branch:
            own = Decision(own.parts, own.parts.when.init())
        state = call.branch.storage[self] = BranchState(own)
        return state

    def must_compute(self, call: Call, state: BranchState) -> str:
        """Return why a branch cannot be skipped in a call, an empty string if it can."""
        timeline = call.timeline
        if timeline.doubt:
            return timeline.doubt
        if state.anchor is None:
            return "first call"
        if call.branch.signature != call.signature:
            return "inputs changed"
        # Another branch computed at a step that this one was not called for: its features are too old.
        if state.anchor < timeline.storage[self].last_computed < timeline.index:
            return "missed a step"
        if state.layout is None and not self.setup.is_module:
            return "output not finite"  # so that nothing could be learned from it
        return "writes a KV cache" if self._has_cache and writes_cache(call.kwargs) else ""

    def _items(self, frame: Frame) -> dict[str, list[Any]]:
        """Return the items of the block lists in this call."""
        setup = self.setup
        if setup.is_module:
            whole = frame.computes and not frame.per_site
            frame.tally = {} if whole and frame.call.signature not in setup.costs else None
            return setup.module_items
        layout = frame.layout = frame.state.layout
        if layout is None:
            return self._trace(frame)
        if frame.decides and setup.waits:
            return gated_items(layout, setup.blocks, setup.probe)
        if frame.computes and frame.per_site:
            skipped = frozenset(site for site in layout.sites if not frame.runs(site))
            items, frame.mixed = layout.mix(skipped)
            return items
        if frame.computes:
            return layout.compute
        return layout.skip if frame.decides else layout.follow

    def _trace(self, frame: Frame) -> dict[str, list[Any]]:
        """Return stand-ins that record the blocks' calls, to learn how they are wired."""
        setup, parts = self.setup, self.setup.parts
        frame.computes = True
        spread = setup.site in (Site.BLOCK, Site.RUN)
        frame.trace = Trace(spread or parts.tail > 0 or setup.anatomy.is_unet, parts.lead)
        hold = frame.decision.hold
        if hold is not None:  # what is learned must be exact, so it is packed afterwards
            frame.features.clear()
            frame.instead = hold.inner
        opened = setup.anatomy.opened
        return {k: frame.trace.items(k, g, opened) for k, g in setup.blocks.items()}

    def given(self, call: Call) -> None:
        """Keep the arguments of a traced call, which models may change."""
        frame: Frame | None = call.storage.get(FRAME)
        if frame is not None and frame.trace is not None:
            given = call.args, call.kwargs
            frame.call, frame.given, frame.random = call, unshared(given), Random(given)

    def ran(self, call: Call, out: Any) -> None:
        """Lay out the method over a traced call; raise AttachError if the model cannot be cached as asked."""
        frame: Frame | None = call.storage.get(FRAME)
        if frame is None or frame.trace is None:
            return
        trace, state, setup = frame.trace, frame.state, self.setup
        learn(frame, trace, frame.given)
        # Tried on the inputs of this very call, of which forecasts are exact: the output must not change.
        if not writes_cache(call.kwargs) and not verify(frame, trace, frame.given, out):
            frame.features.clear()  # the next call is traced again
            return
        assert frame.layout is not None
        setup.layouts[call.signature] = state.layout = frame.layout
        call.storage[ITEMS] = frame.layout.compute
        hold = frame.decision.hold
        if hold is not None:
            frame.instead = hold
            for held in frame.features.values():
                held.states = [hold.adopt(feature) for feature in held.states]
            hold.link([s for held in frame.features.values() for s in held.states])

    def close(self, call: Call, out: Any) -> Any:
        """Keep the output, or stand in for it, at the site MODEL.

        Raises AttachError if the model left out blocks that it ran when it was learned.
        """
        frame: Frame | None = call.storage.get(FRAME)
        if frame is None:
            return None
        setup, layout, replaced = self.setup, frame.layout, None
        if setup.site is Site.MODEL and not frame.computes:
            replaced = stand_in(frame)
        elif setup.site is Site.MODEL or setup.observer is not None:
            replaced = keep_output(frame, out)
        elif not frame.computes and layout is not None and frame.closed != layout.closes:
            raise AttachError(
                f"{setup.anatomy.model}: {frame.closed} of {layout.closes} skipped spans ended; "
                "its forward left out blocks that it ran when its wiring was learned; use "
                "site='model'"
            )
        if frame.computes:
            frame.state.anchor = frame.step.index
            when = frame.decision.parts.when
            if when.reads_output and frame.decides:
                when.returned(frame.decision.state, frame.step, leaves(out)[0].detach())
        elif frame.decides and frame.decision.parts.when.verifies:
            output = leaves(out if replaced is None else replaced)[0].detach()
            frame.decision.parts.when.verified(frame.decision.state, frame.step, output)
        return replaced

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many blocks or modules ran and were skipped; note their operations."""
        frame: Frame | None = call.storage.get(FRAME)
        if frame is None:
            return {}
        setup, layout, record = self.setup, frame.layout, call.record
        if frame.tally is not None:
            setup.costs[call.signature] = frame.tally
        if layout is None:
            counts, record.flops = _of_modules(frame, setup.costs.recall(call.signature))
        else:
            if frame.left_out:
                frame.mixed, frame.per_site = work_of(layout.costs, frame.left_out), True
            if frame.mixed is not None:
                work = frame.mixed
            elif frame.computes:
                work = layout.whole
            else:
                work = layout.less if frame.decides else layout.follow_less
            counts, record.flops = work.counts, work.flops
            if frame.looked and work.flops is not None and layout.look is not None:
                record.flops = work.flops[0] + layout.look, work.flops[1] - layout.look
        record.computed = bool(frame.computes)
        if frame.per_site:
            record.computed = any(ran for ran, _ in counts.values())
        return counts


def unheld(tensors: Iterable[Tensor], kept: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that are none of those that are kept."""
    known = set(map(id, kept))
    for tensor in tensors:
        if id(tensor) not in known:
            yield tensor


def _of_modules(
    frame: Frame, costs: dict[str, float | None] | None
) -> tuple[dict[str, tuple[int, int]], tuple[float, float] | None]:
    """Return, per group of module sites, how many ran and were skipped, and their operations."""
    counts: dict[str, list[int]] = {}
    flops, known = [0.0, 0.0], costs is not None
    for tap, visits in frame.visits.items():
        skipped = not frame.runs(tap.name)
        counts.setdefault(tap.group, [0, 0])[skipped] += visits
        cost = costs.get(tap.name) if costs is not None else None
        flops[skipped] += cost or 0.0
        known = known and cost is not None
    totals = {key: (ran, skipped) for key, (ran, skipped) in counts.items()}
    return totals, (flops[0], flops[1]) if known else None

"""One denoiser call under a method: what it hands out, and what it keeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from diffcache.attach.reuse.again import Random
from diffcache.attach.anchor import ATTRIBUTE
from diffcache.attach.clock import Branch, Timeline
from diffcache.attach.flops import counted
from diffcache.attach.reuse.layout import Layout, Work
from diffcache.attach.reuse.peek import look, plain
from diffcache.attach.record import Call
from diffcache.attach.reuse.stand_in import ComputeTap, LiveTap
from diffcache.attach.tap import FRAME, Tap
from diffcache.attach.reuse.trace import Trace
from diffcache.attach.tree import outputs_of
from diffcache.features.base import Probe
from diffcache.features.when import RANKS
from diffcache.step import Step

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine


class Frame:
    """One call of a denoiser.

    Attributes:
        engine: The engine of the denoiser.
        timeline: Where the denoiser is in its run.
        branch: The guidance branch of this call, which holds the features.
        step: The current step, as methods see it.
        instead: What keeps features and stands in for them.
        decider: Who holds the decision of the step: the timeline, or the branch by itself.
        decides: Whether this call takes the decision of the step.
        apart: Whether sites decide for themselves in this call.
        computes: Whether the sites are computed; None until the probe was seen.
        layout: What to hand out; None in the traced call.
        trace: The recorder of the traced call, else None.
        bases: Span -> the streams at its start.
        given: In the traced call its arguments, with the lists that a model may empty.
        tally: Module site -> its operations, in the call where they are counted; None elsewhere.
        foreseen: Estimates made at the start of the call, by block.
        lasts: Span -> what its last computed block returned.
        visits: Module site -> how often it was called.
        closed: Number of spans whose estimates were used.
        times: Path of a module that embeds the timestep -> its outputs in this call.
        sample: What the denoiser was given to denoise.
        random: The random generators at the start of a traced call.
        repeats: Whether the denoiser is being run once more, to learn.
        mixed: What runs and what is skipped where blocks decide apart, None elsewhere.
        looked: Whether the gate looked into the first block.
    """

    __slots__ = ("_probe_input", "apart", "bases", "branch", "call", "closed", "computes",
                 "decider", "decides", "engine", "foreseen", "given", "instead", "items", "lasts",
                 "layout", "looked", "mixed", "random", "repeats", "sample", "started", "step",
                 "tally", "timeline", "times", "token", "trace", "visits")  # fmt: skip

    def __init__(self, engine: Engine, timeline: Timeline, branch: Branch, step: Step) -> None:
        self.engine = engine
        self.timeline = timeline
        self.branch = branch
        self.step = step
        self.instead = engine.instead
        self.decider = branch if engine.parts.when.by_branch else timeline
        self.decides = False
        self.apart = False
        self.computes: bool | None = None
        self.layout: Layout | None = None
        self.trace: Trace | None = None
        self.given: tuple[Any, Any] = ((), {})
        self.items: dict[str, list[Any]] = {}
        self.bases: dict[Any, tuple[Any, ...]] = {}
        self.lasts: dict[Any, list[Any]] = {}
        self.visits: dict[Any, int] = {}
        self.foreseen: list[list[Tensor]] = []
        self.closed = 0
        self.times: dict[str, list[Tensor]] = {}
        self.sample: Any = None
        self.random: Random | None = None
        self.repeats = False
        self.mixed: Work | None = None
        self.looked = False
        self.tally: dict[str, float | None] | None = None
        self._probe_input: Tensor | None = None
        self.token: Any = None
        self.call: Call | None = None
        self.started = time.perf_counter()

    def items_of(self, blocks: nn.ModuleList) -> list[Any] | None:
        """Return what stands for the blocks of a list, None for a list of another model."""
        owner, key = blocks.__dict__[ATTRIBUTE]
        return self.items.get(key) if owner is self.engine else None

    def runs(self, site: str) -> bool:
        """Return whether a site is computed in this call; known once the step is decided."""
        if not self.apart or not self.computes:
            return bool(self.computes)
        engine = self.engine
        return site not in engine.apart or engine.parts.when.computes_at(self.step, site)

    def decide(self, probe: Tensor | None) -> None:
        """Take the decision of this step, for all its branches or for this one."""
        when, decider = self.engine.parts.when, self.decider
        observer = self.engine.handle.observer
        if observer is not None and probe is not None:
            observer.probe(self.step, probe.detach())
        if self.computes is None and probe is None:
            self.computes = when.should_compute(decider.when_state, self.step, None)
        elif self.computes is None:
            token = RANKS.set(ranks_of(self.engine.model))
            try:
                self.computes = when.should_compute(decider.when_state, self.step, probe)
            finally:
                RANKS.reset(token)
        if self.computes:
            when.computed(decider.when_state, self.step, probe)
            decider.last_computed = self.step.index
        decider.decided_at = self.step.index
        decider.computes = self.computes

    def counted(self, site: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module; the first time, count its operations as those of a site."""
        if self.tally is None:
            return module(*args, **kwargs)
        out, flops = counted(module, args, kwargs)
        before = self.tally.get(site, 0.0)
        self.tally[site] = None if flops is None or before is None else before + flops
        return out

    def probe_of(self, before: Tensor, after: Tensor) -> Tensor:
        """Return what the method's gate looks at."""
        if self.engine.parts.when.probe == "residual" and before.shape == after.shape:
            return after - before
        return after


def ranks_of(model: nn.Module) -> Any:
    """Return the process group over which diffusers splits each sample, None when it does not."""
    config = getattr(model, "_parallel_config", None)
    for name in ("context_parallel_config", "tensor_parallel_config"):
        part = getattr(config, name, None)
        mesh = getattr(part, "_flattened_mesh", None) or getattr(part, "_mesh", None)
        if mesh is not None:
            return mesh.get_group()
    return None


class LeadTap(Tap):
    """A lead block: it always runs; behind the last one the decision falls."""

    __slots__ = ("argument", "first", "item", "last", "number")

    def __init__(self, item: Any, place: tuple[Any, int], first: bool, last: bool) -> None:
        super().__init__(item.module if isinstance(item, (ComputeTap, LiveTap)) else item)
        self.item = item  # what runs: the block, or a tap that keeps features of it
        self.argument, self.number = place
        self.first, self.last = first, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame: Frame = FRAME.get()  # type: ignore[assignment]
        if self.first:
            key = self.argument
            frame._probe_input = kwargs[key] if isinstance(key, str) else args[key]
        out = self.item(*args, **kwargs)
        if self.last and frame._probe_input is not None:
            frame.decide(frame.probe_of(frame._probe_input, outputs_of(out)[self.number]))
            frame._probe_input = None
        return out


class LateTap(Tap):
    """A block behind the lead: what stands for it is known only when it is called."""

    __slots__ = ("index", "key")

    def __init__(self, module: nn.Module, key: str, index: int) -> None:
        super().__init__(module)
        self.key, self.index = key, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block."""
        frame: Frame = FRAME.get()  # type: ignore[assignment]
        layout = frame.layout
        assert layout is not None
        items = layout.compute if frame.computes else layout.skip
        return items[self.key][self.index](*args, **kwargs)


class PeekTap(Tap):
    """A block of a model where something is looked at before any block runs."""

    __slots__ = ("late",)

    def __init__(self, module: nn.Module, key: str, index: int) -> None:
        super().__init__(module)
        self.late = LateTap(module, key, index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the block; the first one decides for the step."""
        frame: Frame = FRAME.get()  # type: ignore[assignment]
        if frame.decider.decided_at != frame.step.index:
            frame.looked = True
            frame.decide(self._look(frame, args, kwargs))
        return self.late(*args, **kwargs)

    def _look(self, frame: Frame, args: Any, kwargs: Any) -> Tensor:
        """Return the probe; the first time, count the operations that it takes."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            return look(frame.engine, plain(self.module), args, kwargs)

        layout = frame.layout
        assert layout is not None
        if layout.whole.flops is None or layout.look is not None:
            return call(*args, **kwargs)
        probe, layout.look = counted(self.module, args, kwargs, call)
        return probe  # type: ignore[no-any-return]


def gated_items(
    layout: Layout, blocks: dict[str, list[nn.Module]], probe: Probe
) -> dict[str, list[Any]]:
    """Return what to hand out while the decision waits for the probe."""
    if layout.gated is not None:
        return layout.gated
    items: dict[str, list[Any]] = {}
    peeks = probe not in ("residual", "output")
    late = PeekTap if peeks else LateTap
    for key, group in blocks.items():
        if key in layout.streams:
            items[key] = [late(module, key, index) for index, module in enumerate(group)]
    layout.gated = items
    if peeks:
        return items
    lead = layout.lead_calls
    for key, index in lead:
        place = main_stream(layout, key)
        items[key][index] = LeadTap(
            layout.compute[key][index], place, (key, index) == lead[0], (key, index) == lead[-1]
        )
    return items


def main_stream(layout: Layout, list_key: str) -> tuple[Any, int]:
    """Return where a lead block takes the stream of the sample, and which output it becomes.

    It is a stream that changes with the sample, one called `hidden_states` before others.
    """
    carry, streams = layout.wirings[list_key].carry, layout.streams[list_key]
    for stream in streams:
        for number, key in carry.items():
            if key == stream:
                return key, number
    number = next(iter(carry), 0)
    return carry.get(number, streams[0]), number

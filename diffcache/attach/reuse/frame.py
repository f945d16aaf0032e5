"""One denoiser call under feature reuse: its stand-ins, and the features it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.call import Call
from diffcache.attach.flop_counter import counted
from diffcache.attach.reuse.layout import BlockWork, Layout
from diffcache.attach.reuse.setup import BranchState, Decision, Setup
from diffcache.attach.reuse.trace import Trace
from diffcache.attach.tree import leaves
from diffcache.errors import AttachError
from diffcache.features.base import Instead
from diffcache.step import CURRENT, Step

FRAME = "frame"  # in a call's storage


class Random:
    """The states of the host's and the devices' random generators at the start of a call.

    Args:
        call: Positional and keyword arguments of the call, which say the devices.
    """

    def __init__(self, call: Any) -> None:
        devices = {tensor.device for tensor in leaves(call) if tensor.device.type == "cuda"}
        self._devices = sorted(devices, key=str)
        self._start = self._now()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the random numbers of the call again; later draws are as without it."""
        now = self._now()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], self._devices, strict=True):
            torch.cuda.set_rng_state(state, device)


@dataclass(eq=False, slots=True)
class Frame:
    """One call of a denoiser, private to feature reuse."""

    setup: Setup  # setup of reuse on the denoiser
    call: Call  # the call
    state: BranchState  # state of its guidance branch
    # state of the first guidance branch, which may be the same; None where it is gone
    first: BranchState | None = None
    step: Step = field(init=False)  # its step, as methods see it
    features: dict[Any, Any] = field(init=False)  # features of the branch by place
    decision: Decision = field(init=False)  # decision of the step, that of the run or of the branch by itself
    instead: Instead = field(init=False)  # stand-in that keeps features and estimates those of skipped steps
    decides: bool = False  # whether this call takes the decision of the step
    per_site: bool = False  # whether sites decide for themselves in this call
    computes: bool | None = None  # whether the sites are computed; None until the probe was seen
    layout: Layout | None = None  # layout to hand out; None in the traced call
    trace: Trace | None = None  # the recorder of the traced call, else None
    # arguments of the traced call; lists are copied, since some models pop from them
    given: tuple[Any, Any] = ((), {})
    bases: dict[Any, tuple[Any, ...]] = field(default_factory=dict)  # span -> the streams at its start
    lasts: dict[Any, list[Any]] = field(default_factory=dict)  # span -> what its last computed block returned
    visits: dict[Any, int] = field(default_factory=dict)  # module site -> how often it was called
    # estimates made at the start of the call, by block; states where `adds_at_once`
    foreseen: list[list[Any]] = field(default_factory=list)
    adds_at_once: bool = False  # whether a kernel makes the estimate of a block as it is added to its streams
    closed: int = 0  # number of skipped spans that ended
    # path of a module that embeds the timestep -> what it returned
    times: dict[str, list[Tensor]] = field(default_factory=dict)
    random: Random | None = None  # random generators at the start of a traced call
    mixed: BlockWork | None = None  # items to hand out where blocks decide apart, and their work; None elsewhere
    looked: bool = False  # whether the gate looked into the first block
    # module site -> its operations, in the call where they are counted; None elsewhere
    tally: dict[str, float | None] | None = None
    probe_input: Tensor | None = None  # stream that the lead blocks were given, until the decision fell
    left_out: set[tuple[str, int]] = field(default_factory=set)  # blocks that were skipped by their own gates

    def __post_init__(self) -> None:
        self.step = self.call.step
        self.features = self.state.features
        self.decision = self.state.decision
        self.instead = self.decision.parts.instead

    def runs(self, site: str) -> bool:
        """Return whether a site that may decide for itself is computed in this call."""
        if not self.per_site or not self.computes:
            return bool(self.computes)
        when = self.decision.parts.when
        kind = self.setup.kinds.get(site, site)
        return site not in self.setup.own_sites or when.computes_at(self.step, kind)

    def decide(self, probe: Tensor | None) -> None:
        """Take the decision of this step, for all its branches or for this one."""
        when, decision = self.decision.parts.when, self.decision
        observer = self.setup.observer
        if observer is not None and probe is not None:
            observer.probe(self.step, probe.detach())
        if self.computes is None:
            self.computes = when.should_compute(decision.state, self.step, probe)
        if self.computes:
            when.computed(decision.state, self.step, probe)
            decision.last_computed = self.step.index
        decision.index = self.step.index
        decision.computes = self.computes
        self.call.record.computed = self.computes

    def asks_block(self, block: str, value: Tensor) -> bool:
        """Return whether a block is skipped by its own input, which is kept where it is not."""
        decision, forced = self.decision, bool(self.call.record.reason)
        when, state = decision.parts.when, decision.state
        if not forced and when.skips_block(state, self.step, block, value):
            return True
        when.computed_block(state, block, value)
        return False

    def counted(self, site: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module; the first time, count its operations as those of a site."""
        if self.tally is None:
            return module(*args, **kwargs)
        out, flops = counted(module, args, kwargs)
        before = self.tally.get(site, 0.0)
        self.tally[site] = None if flops is None or before is None else before + flops
        return out

    def probe_of(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the probe of the method's gate."""
        if self.setup.probe == "residual" and before.shape == after.shape:
            return after - before
        return after


def current_frame() -> Frame:
    """Return the frame of the denoiser call that this thread is in, which reuse opened.

    Raises AttachError if the call is over, since the denoiser was called again from inside it.
    """
    call: Call | None = CURRENT.get()
    if call is None:
        raise lost()
    frame: Frame = call.storage[FRAME]
    return frame


def lost() -> AttachError:
    """Return the error of a stand-in whose call is over."""
    return AttachError(
        "a wrapped denoiser was called again from inside a call of its own, so its features "
        "are lost; call it before or after, or unwrap it"
    )

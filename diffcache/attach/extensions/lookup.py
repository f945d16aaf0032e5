"""Look up the outputs of modules that depend on the timestep and the condition alone."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.call import Call, in_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.extensions.lookup_entries import ConditionEntries, LookupTable, RunWrites, SiteEntry, Write
from diffcache.attach.extensions.lookup_layers import Given
from diffcache.attach.extensions.lookup_sites import TimeSite, time_sites
from diffcache.attach.record import CallRecord
from diffcache.attach.reuse.reusing import FeatureReuse
from diffcache.attach.reuse.time_probe import TimePeek
from diffcache.attach.run import Run
from diffcache.attach.signature import Contents, others_in, tensors_in, writes_cache
from diffcache.attach.tap import Tap, TapDict, tap_children, untap_children
from diffcache.attach.tree import leaves, unshared
from diffcache.errors import AttachError, CacheWarning
from diffcache.features.temporal_table import TemporalTable, disturbance
from diffcache.foreign import children_of
from diffcache.step import CURRENT
from diffcache.weights import Weights

COUNTED = "timestep modules"  # their name in reports
_LARGEST = 2**26  # bytes; sites that depend on larger arguments are left alone


class TimeTap(Tap):
    """A module that is looked up."""

    __slots__ = ("learned", "lookup", "name", "parent")

    def __init__(self, parent: nn.Module, child: str, lookup: Lookup, name: str) -> None:
        super().__init__(parent.get_submodule(child))
        self.parent, self.lookup, self.name = parent, lookup, name
        self.learned = self.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the module."""
        return self.lookup.answer(self, args, kwargs)


@dataclass(eq=False)
class RunState:
    """State of one run."""

    number: int  # number of the run, counted over all threads
    fresh: bool = True  # whether the weights are still to be looked at
    writes: RunWrites = field(default_factory=RunWrites)  # entries that the run wrote into the table
    contents: Contents = field(default_factory=Contents)  # contents of the tensors that its calls are given
    # site -> the entries of its condition in this call
    conditions: dict[str, ConditionEntries] = field(default_factory=dict)
    record: CallRecord | None = None  # record of the call
    called: set[tuple[Any, str]] = field(default_factory=set)  # calls of sites in this call
    # number of sites that ran in this call, and of those that were looked up
    counts: list[int] = field(default_factory=lambda: [0, 0])


class Lookup(Extension):
    """The tables of one denoiser, until it is detached; threads share them, under a lock.

    Entries are keyed by content: the arguments that a module's output was seen to be made from,
    bit for bit, those of one number a sample, and all else of the call but the values of other
    tensors. To read them off an accelerator makes it wait once a call. What is looked up is bit
    for bit what the module returned; rows of a batch that are alike are kept once. With gradients
    on for the modules' weights everything is computed. What a module does besides returning a
    value is not seen, nor are settings that are neither arguments nor around its weights.
    """

    def __init__(self, denoiser: Denoiser, ability: TemporalTable) -> None:
        self.denoiser, self.ability = denoiser, ability
        self.table = LookupTable(ability)
        self.taps: dict[str, TimeTap] = {}
        self.kinds: dict[Any, list[TimeSite]] = {}
        self.weights: Weights | None = None
        self._lock = threading.RLock()
        self._runs: list[tuple[Run, RunWrites]] = []
        self._number = 0

    def held_bytes(self, runs: list[Run]) -> int:
        """Return the bytes of all tables, which runs share and which outlast them; 0 in none."""
        with self._lock:
            return self.table.nbytes if runs else 0

    # calls ---------------------------------------------------------------------------------

    def open(self, call: Call) -> Call:
        """Find the entries of this call's timestep and conditions."""
        if not call.writes:
            with self._lock:
                self._find(call)
        return call

    def _find(self, call: Call) -> None:
        """Find the entries of a call; under the lock."""
        state = self._state(call)
        state.conditions, state.counts, state.called, state.record = {}, [0, 0], set(), call.record
        given = self.denoiser.named(call.args, call.kwargs)
        tensors = tensors_in(given)
        sites = self._sites(call, given, tensors)
        if not sites or self.weights is None or self.weights.trained():
            return
        common = self._common(call, given, tensors)
        conditions: dict[frozenset[str], ConditionEntries | None] = {}
        for site in sites:
            if site.arguments not in conditions:
                own = [(p, state.contents.of(tensors[p])) for p in sorted(site.arguments)]
                key = (common, tuple(own))
                conditions[site.arguments] = self.table.entries_of(key, state.number)
            entries = conditions[site.arguments]
            if entries is not None:
                state.conditions[site.path] = entries

    def answer(self, tap: TimeTap, args: Any, kwargs: Any) -> Any:
        """Look up the output of a module, or let the module run and keep its output."""
        call: Call = CURRENT.get()
        state: RunState | None = call.run.storage.get(self)
        entries = state.conditions.get(tap.name) if state is not None else None
        as_it_is = call.writes or tap.module is not tap.learned  # or replaced since
        if state is None or entries is None or as_it_is or (call, tap.name) in state.called:
            return tap.module(*args, **kwargs)
        state.called.add((call, tap.name))
        kept = entries.get(tap.name)
        counts = state.counts if call.record is state.record and not call.repeats else [0, 0]
        if kept is not None and not kept.layer:
            counts[1] += 1
            return kept.value()
        counts[0] += 1
        if kept is not None:
            return self._rounded(tap)(*args, **kwargs)
        out = tap.module(*args, **kwargs)
        exact = leaves(out)
        if any(tensor.requires_grad for tensor in exact):
            return out
        harm, given = None, None
        if self.ability.bits is not None and self.ability.keep != "table":
            layer = self._rounded(tap)
            if self.ability.reconstruct:
                given = Given.of(args, kwargs, exact[0].device.type)
            else:
                harm = disturbance(exact, leaves(layer(*args, **kwargs)))
        state.writes.write(Write(entries, tap.name, SiteEntry.of(out), harm, given))
        return out

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return how many of the modules ran and were looked up."""
        state = None if call.writes else call.run.storage.get(self)
        return {COUNTED: (state.counts[0], state.counts[1])} if state and any(state.counts) else {}

    def _rounded(self, tap: TimeTap) -> nn.Module:
        with self._lock:
            return self.table.layer(tap.name, tap.module)

    # runs ----------------------------------------------------------------------------------

    def _state(self, call: Call) -> RunState:
        """Return the state of this run, of a new one where a run starts."""
        timeline, run = call.timeline, call.run
        state: RunState | None = run.storage.get(self)
        if state is None or (timeline.index == 0 and timeline.calls == 1):
            self._end_runs(run)
            self._number += 1
            state = run.storage[self] = RunState(self._number)
            self._runs.append((run, state.writes))
        return state

    def _end_runs(self, starting: Run) -> None:
        """Close the writes of runs that are over."""
        going = []
        for run, writes in self._runs:
            state = run.storage.get(self)
            if run is starting or state is None or state.writes is not writes:
                if self.ability.reconstruct and self.weights and self.weights.changed(True):
                    writes.lines = []  # what the layers of these entries stand for is gone
                self.table.close(writes)
            else:
                going.append((run, writes))
        self._runs = going

    def _sites(self, call: Call, given: dict[str, Any], tensors: dict[str, Tensor]) -> list[TimeSite]:
        """Return the sites of this kind of call, learned when it is new or weights changed."""
        state: RunState = call.run.storage[self]
        if self.weights is not None and self.weights.changed(state.fresh):
            self.clear()
        state.fresh = False
        kind = tuple(sorted(tensors)), tuple(path for path, _ in others_in(given))
        if kind not in self.kinds:
            if writes_cache(given):  # a second forward would write twice
                return []
            self.kinds[kind] = self._learn(call, tensors)
        return self.kinds[kind]

    def _learn(self, call: Call, tensors: dict[str, Tensor]) -> list[TimeSite]:
        """Follow one forward to the modules that can be looked up, and tap them."""
        model, sample = self.denoiser.model, str(self.denoiser.anatomy.sample)
        samples = {p for p in tensors if p == sample or p.startswith(sample + ".")}
        args, kwargs = unshared((call.args, call.kwargs))
        cached = torch.is_autocast_cache_enabled()
        untapped = replace(call, owner=None, repeats=True)
        torch.set_autocast_cache_enabled(False)
        try:
            with in_call(untapped), torch.random.fork_rng(enabled=model.training):
                sites = time_sites(
                    model,
                    lambda: model.forward(*args, **kwargs),
                    {path: t for path, t in tensors.items() if path not in samples},
                    [tensors[path] for path in samples],
                )
        except RuntimeError as error:  # flex attention, for one, refuses to be followed
            self._warn(f"its forward cannot be followed ({str(error)[:200]})")
            return []
        finally:
            torch.set_autocast_cache_enabled(cached)
        sites = [s for s in sites if sum(tensors[p].nbytes for p in s.arguments) <= _LARGEST]
        if not sites:
            self._warn("no module was seen to depend on the timestep and conditions alone")
        # numbers of a sample may be read in ways that are not seen: they are in every key
        numbers = frozenset(p for p, t in tensors.items() if t.dim() <= 1 and p not in samples)
        sites = [replace(site, arguments=site.arguments | numbers) for site in sites]
        for site in sites:
            self._tap(site.path)
        known = [site for kind in self.kinds.values() for site in kind]
        self.weights = Weights(model, [place for s in (*known, *sites) for place in s.weights])
        return sites

    def _warn(self, why: str) -> None:
        model = self.denoiser.anatomy.model
        warnings.warn(f"{model}: {why}, so no temporal table is kept", CacheWarning, stacklevel=4)

    def _tap(self, path: str) -> None:
        parent_path, _, child = path.rpartition(".")
        parent = self.denoiser.model.get_submodule(parent_path)
        taken = getattr(children_of(parent), "taps", {})
        if path not in self.taps and child not in taken:
            self.taps[path] = TimeTap(parent, child, self, path)
            tap_children(parent, self.denoiser, {child: self.taps[path]})

    def _common(self, call: Call, given: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """Return all of a call but the contents of its tensors, hashable."""
        device = next((t.device.type for t in tensors.values()), "cpu")
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        looks = tuple((p, t.shape, t.dtype, t.device) for p, t in tensors.items())
        # other extensions may have settings by step, such as scales of activations
        others = [e for e in self.denoiser.extensions if not isinstance(e, (FeatureReuse, Lookup))]
        step = call.step.index if others else None
        return cast, self.denoiser.model.training, step, looks, others_in(given)

    # tables --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every entry and all facts learned of the model."""
        with self._lock:
            self.remove()
            self.table.clear()
            for _, writes in self._runs:
                writes.lines = []
            self.kinds, self.weights = {}, None

    def remove(self) -> None:
        """Leave the model as it was found."""
        for path, tap in self.taps.items():
            children = children_of(tap.parent)
            if isinstance(children, TapDict):
                children.taps.pop(path.rpartition(".")[2], None)
                if not children.taps:
                    untap_children(tap.parent)
        self.taps = {}


def install(denoiser: Denoiser, ability: TemporalTable) -> Lookup:
    """Return the tables of a denoiser; raise AttachError if a gate looks at the time embedding that they hold."""
    for extension in denoiser.extensions:
        if isinstance(extension, FeatureReuse) and isinstance(extension.setup.peek, TimePeek):
            raise AttachError(
                f"{denoiser.anatomy.model}: a gate on the time embedding and look-up tables of the "
                "modules that make it do not go together; use input='modulated', or no tables"
            )
    return Lookup(denoiser, ability)

"""The error of every stand-in against the truth: what each site would add to each skipped step.

The full model runs throughout. Where the method would skip, its estimate is asked first, compared
with the feature that the model then computes, and thrown away; the method's own state learns only
what it would have learned. Errors are therefore those of a single skip along the uncached
trajectory (open loop); they do not add up along a run as those of a real one do.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from statistics import fmean
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from diffcache.api import wrapped
from diffcache.attach.call import Call
from diffcache.attach.handle import Handle
from diffcache.attach.reuse.extension import FeatureReuse
from diffcache.attach.reuse.setup import BranchState
from diffcache.attach.reuse.span import OUTPUT
from diffcache.attach.run import Branch
from diffcache.catalog import make_method
from diffcache.errors import CacheWarning, DiffcacheError
from diffcache.features.base import Instead, Method, Probe, When
from diffcache.features.combine import Combine, FeatureMethod, reuse_of
from diffcache.step import Site, Step


@dataclass(frozen=True)
class SiteErrors:
    """The relative L1 error of every stand-in, by site and step.

    Attributes:
        sites: Paths of blocks or modules in the order in which they ran: `transformer_blocks.3`,
            `transformer_blocks.3.attn`; the list of blocks at site `stack`, the closing block of
            each span at site `run`, `output` at site `model`. With several denoisers each path
            begins with the denoiser's name.
        steps: Step indices of the run, from 0.
        values: A row for every site, a number for every step: `sum|estimate - true| / sum|true|`,
            dimensionless, over all samples, tokens, channels and streams of one call, averaged
            over the guidance branches and runs that would skip; None where none would, or where
            the true feature is zero and the estimate is not, or one of them is not finite.
    """

    sites: list[str]
    steps: list[int]
    values: list[list[float | None]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data as in the `site_error` of a record."""
        return {"sites": self.sites, "steps": self.steps, "values": self.values}


def observe(pipe: Any, method: str | Method, call: Callable[[], object]) -> SiteErrors:
    """Measure what a method's stand-ins would be off by, without ever using one.

    Args:
        pipe: A pipeline or denoiser that is not wrapped; it is left bit for bit as it was, also
            after an exception.
        method: The method to observe, or its catalogue name.
        call: Runs `pipe`, once or for several prompts, in this thread; what it draws is what the
            uncached pipeline draws.

    Raises:
        AttachError: If the pipeline cannot be cached with this method, or is cached already.
        DiffcacheError: If `call` ran no denoiser of `pipe`.
    """
    observer = _Observer(make_method(method))
    with wrapped(pipe, _Observed(observer)) as handle, warnings.catch_warnings():
        # every step is computed, which the handle would report as a run that skipped nothing
        warnings.filterwarnings("ignore", ".*skipped nothing", CacheWarning)
        observer.attend(handle)
        call()
    if not observer.sites:
        raise DiffcacheError(
            f"the call ran no denoiser of this {type(pipe).__name__}; run the pipeline that is "
            "passed to observe"
        )
    return observer.errors()


class _Observer:
    """Notes of the wrapped parts of one method on a run."""

    def __init__(self, method: Method) -> None:
        parts = reuse_of(method)
        if parts is None:
            raise ValueError(f"{method!r}: reuses no features, so there are no errors to measure")
        self.parts = parts
        self.sites: dict[str, None] = {}
        self.length = 0
        self.several = False
        # The call in progress, its reuse, and whether it must be computed.
        self.reuse: FeatureReuse | None = None
        self.call: Call | None = None
        self.forced = True
        # Branches are freed with their features at the end of a run, so they are not kept here.
        self.anchors: WeakKeyDictionary[Branch, int] = WeakKeyDictionary()
        self.serials: WeakKeyDictionary[Branch, int] = WeakKeyDictionary()
        self.numbers = count()
        self.norms: defaultdict[tuple[int, str, int], list[Tensor]] = defaultdict(list)

    def attend(self, handle: Handle) -> None:
        """Follow every denoiser call that a handle opens."""
        self.several = len(handle.denoisers) > 1
        for denoiser in handle.denoisers:
            for extension in denoiser.extensions:
                if isinstance(extension, FeatureReuse):
                    # Neither a schedule nor a stand-in is told which branch and site it works for.
                    extension.__dict__["must_compute"] = self._listener(extension)

    def _listener(self, reuse: FeatureReuse) -> Callable[..., str]:
        """Return what reuse asks, at every call, whether a branch has to be computed."""
        inner = reuse.must_compute

        def must_compute(call: Call, state: BranchState) -> str:
            reason, branch = inner(call, state), call.branch
            if reason in ("", "missed a step"):
                # Every step is computed here; a real run skips some of those the branch missed.
                last: int = call.timeline.storage[reuse].state.last
                missed = self.anchors.get(branch, -1) < last < call.timeline.index
                reason = "missed a step" if missed else ""
            if branch not in self.serials:
                self.serials[branch] = next(self.numbers)
            self.reuse, self.call, self.forced = reuse, call, bool(reason)
            return reason

        return must_compute

    def skips(self, step: Step) -> bool:
        """Return whether a real run would skip the call in progress."""
        assert self.call is not None
        verdicts: Verdicts = self.call.timeline.storage[self.reuse].state
        return not self.forced and step.index in verdicts.skipped

    def site_of(self, state: Guess) -> str | None:
        """Return the site that a state belongs to, None if its estimates are of no consequence."""
        assert self.reuse is not None
        assert self.call is not None
        site, features = self.reuse.setup.site, self.call.branch.storage[self.reuse].features
        key = next(k for k, held in features.items() if any(own is state for own in held.states))
        if site is Site.MODEL:
            name = "output" if key == OUTPUT else None
        elif site in (Site.STACK, Site.DEEP):
            name = key[0]
        else:
            name = key[0] if site.is_module else f"{key[0]}.{key[1]}"
        if name is not None and self.several:
            name = f"{self.call.record.denoiser}.{name}"
        return name

    def note(self, state: Guess, step: Step, feature: Tensor, estimate: Tensor | None) -> None:
        """Take down what an estimate is off by, or that there is none."""
        assert self.call is not None
        if not state.is_named:
            state.site, state.is_named = self.site_of(state), True
        # A denoiser counts its own steps; the columns are those of the run.
        index = self.call.timeline.started_at + step.index
        self.length = max(self.length, index + 1)
        if state.site is None:
            return
        self.sites.setdefault(state.site)
        if estimate is not None:
            true = feature.float()
            norms = (torch.dist(estimate.float(), true, 1), torch.linalg.vector_norm(true, 1))
            self.norms[self.serials[self.call.branch], state.site, index].append(torch.stack(norms))

    def errors(self) -> SiteErrors:
        """Return the mean of the relative errors of every site and step."""
        ratios: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for (_, site, index), norms in self.norms.items():
            error, scale = torch.stack(norms).double().sum(0).tolist()
            if isfinite(error) and isfinite(scale) and (scale or not error):
                ratios[site, index].append(error / scale if scale else 0.0)
        steps = list(range(self.length))
        means = {place: fmean(values) for place, values in ratios.items()}
        values = [[means.get((site, index)) for index in steps] for site in self.sites]
        return SiteErrors(list(self.sites), steps, values)


@dataclass(frozen=True)
class _Observed(FeatureMethod):
    """A method whose every step is computed, and whose estimates are compared."""

    name: ClassVar[str] = "observed"
    observer: _Observer

    def parts(self) -> Combine:
        """Return the method's parts, both listened to."""
        parts = self.observer.parts
        when = _Verdicts(parts.when)
        return replace(parts, when=when, instead=_Guesses(parts.instead, self.observer))


@dataclass
class Verdicts:
    """Decisions of a schedule on the steps so far.

    Attributes:
        inner: The schedule's own state.
        asked: The step it was last asked about.
        said: Whether it wants that step computed.
        skipped: The steps it would have skipped.
        last: The last step it would have computed.
    """

    inner: Any
    asked: int = -1
    said: bool = True
    skipped: set[int] = field(default_factory=set)
    last: int = -1


@dataclass(frozen=True)
class _Verdicts(When):
    """Computes every step and keeps what another schedule would have said."""

    inner: When

    @property
    def probe(self) -> Probe | None:
        """Probe that the schedule looks at."""
        return self.inner.probe

    def init(self) -> Verdicts:
        """Return an empty run."""
        return Verdicts(self.inner.init())

    def should_compute(self, state: Verdicts, step: Step, probe: Tensor | None) -> bool:
        """Return True, and note what the schedule says."""
        state.asked = step.index
        state.said = self.inner.should_compute(state.inner, step, probe)
        return True

    def computed(self, state: Verdicts, step: Step, probe: Tensor | None) -> None:
        """Tell the schedule of the step if a real run computes it."""
        if state.asked == step.index and not state.said:
            state.skipped.add(step.index)
            return
        state.last = step.index
        self.inner.computed(state.inner, step, probe)

    def held(self, state: Verdicts) -> list[Tensor]:
        """Return what the schedule keeps."""
        return self.inner.held(state.inner)


@dataclass(eq=False)
class Guess:
    """The state of one feature: that of the method, and the site it belongs to."""

    inner: Any
    site: str | None = None
    is_named: bool = False


@dataclass(frozen=True)
class _Guesses(Instead):
    """Compares another stand-in with every feature it would have replaced."""

    inner: Instead
    observer: _Observer

    def init(self) -> Guess:
        """Return an empty state."""
        return Guess(self.inner.init())

    def record(self, state: Guess, step: Step, feature: Tensor) -> None:
        """Compare the estimate if a real run skips this step, else let the stand-in learn."""
        observer = self.observer
        if observer.skips(step) and state.is_named:
            observer.note(state, step, feature, self.inner.estimate(state.inner, step))
            return
        observer.note(state, step, feature, None)
        assert observer.call is not None
        observer.anchors[observer.call.branch] = step.index
        self.inner.record(state.inner, step, feature)

    def estimate(self, state: Guess, step: Step) -> Tensor:
        """Return the stand-in's estimate, which is asked for at recorded steps only."""
        return self.inner.estimate(state.inner, step)

    def held(self, state: Guess) -> list[Tensor]:
        """Return what the stand-in keeps."""
        return self.inner.held(state.inner)

    def is_held(self, state: Guess) -> bool:
        """Return whether an estimate is a held tensor."""
        return self.inner.is_held(state.inner)

"""Space of a search: families of settings out of the whole catalog, and schedules around the best.

A family holds the settings of one kind of method, from the cheapest to the dearest:

- 1 to T - 1 computed steps at even distances with the forecast of every method of the catalog that
  has a fixed schedule, and with Taylor's and Newton's of order 2: at the sites `model` and `stack`,
  on UNets at `deep`, and if it holds few features at `module`; those of `FreqCa` and `Spectrum` at
  `stack` alone;
- `FittedForecast` of 1 to T - 1 steps from 2 and from 3 computed features, at the same sites but
  `module`, whose features of a whole run are too many to calibrate on; key steps of `DPCache`;
- thresholds from 1.5 to 0.02 of every gate;
- the schedules of `Spectrum` by its window and of `StepMask` by its level, `PAB` and `FasterCache`
  by their intervals, `BAC` with every `count`, and `ProfilingDiT` with every interval behind a
  warm-up of 2.

The best fixed schedules are tried with other steps: intervals that grow, warm-ups of 1 to 3 steps before an interval,
which are those of `Interval` (FORA at `module`) and `TaylorSeer`, and those that fitted forecasts choose; the best
schedules with every other forecast at every other site; the best gates with other forecasts. Then single computed
steps are dropped or added, and one or two adjacent ones moved by one.

Not in it: the site `block`, at which these forecasts do what they do at `stack` and hold more; the site `run`, whose
blocks have to be named; and the methods in `LEFT_OUT`, with the reasons. All of them but `temporal-table` can be given
in `methods`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import diffcache
from diffcache.errors import AttachError
from diffcache.features.base import Method, When
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine, FeatureMethod, reuse_of
from diffcache.features.fitted import Weighted
from diffcache.features.parts.fit import Fit
from diffcache.features.parts.instead import Newton
from diffcache.features.parts.region_mask import Planned
from diffcache.features.parts.when import Every, Listed, steps_of
from diffcache.features.step_mask import LEVELS
from diffcache.features.step_reuse import StepReuse
from diffcache.features.tables import Tables
from diffcache.step import Site

Ladder = Sequence[Method]
# Methods whose forecasts are put on schedules; Newton's is of no method of the catalog.
FORECASTS: tuple[FeatureMethod, ...] = (
    diffcache.TaylorSeer(order=1),
    diffcache.Interval(),
    Combine(Every(2), Newton(2)),
    diffcache.TaylorSeer(order=2),
    diffcache.HiCache(),
    diffcache.FoCa(),
    diffcache.DMD(),
    diffcache.FreqCa(),
    diffcache.Spectrum(),
)
GATES: tuple[FeatureMethod, ...] = (
    diffcache.FirstBlock(),
    diffcache.ConfidenceGatedTaylor(warmup=3),
    diffcache.DBCache(warmup=3, order=1),
    diffcache.SeaCache(first="filtered"),
    diffcache.SeaCache(first="filtered", order=1),
    diffcache.EasyCache(warmup=3),
    diffcache.LazyCache(warmup=3),
    StepReuse(warmup=3, longest=3),
    diffcache.DBPrune(warmup=3),
    diffcache.SpeCa(),
)
THRESHOLDS = tuple(round(1.5 * 0.75**number, 3) for number in range(16))
WINDOWS = (12.0, 9.0, 7.0, 5.0, 4.0, 3.0, 2.0, 1.5)  # of Spectrum
# Method of the catalog -> why a search leaves it out.
LEFT_OUT: Mapping[str, str] = {
    "cachequant": "is calibrated for every setting anew",
    "ertacache": "is calibrated for every setting anew",
    "harmonica": "is trained for every setting",
    "regione": "is for edits",
    "temporal-table": "skips no step and goes with any choice",
    "tuned": "is what a search returns",
}


@dataclass(frozen=True, eq=False)
class Rungs:
    """Settings of one kind of method of the catalog, from the cheapest to the dearest."""

    name: str
    ladder: Ladder

    @cached_property
    def traits(self) -> tuple[str, ...]:
        """Traits that neighbors share: kind of schedule, forecast, site."""
        first = self.ladder[0]
        if isinstance(first, (diffcache.FittedForecast, diffcache.DPCache)):  # whose schedule takes a while to find
            order = getattr(first, "history", 2)
            return ("Listed", f"fitted to {order} steps", f"site {Site.of(first.site).value}")
        reuse = reuse_of(first)
        if reuse is None:
            return ()
        return (type(reuse.when).__name__, repr(reuse.instead), f"site {Site.of(reuse.site).value}")

    def __str__(self) -> str:
        return " ".join([self.name, *self.traits[1:]])


def sites(is_unet: bool) -> tuple[Site, ...]:
    """Return the sites of forecasts, first the one at which a skipped step costs least."""
    return (Site.MODEL, Site.STACK, Site.MODULE, *([Site.DEEP] if is_unet else []))


def to_calibrate(places: Sequence[Site], total: int) -> list[list[Calibrated]]:
    """Return the methods that need tables, for runs of `total` steps; those of a list share a pass."""
    fitted = [diffcache.FittedForecast(site=site) for site in places if site is not Site.MODULE]
    magnitude = diffcache.MagCache(longest=5, retention=0.05)
    others: list[Calibrated] = [diffcache.TeaCache(), diffcache.BAC(count=1), diffcache.ProfilingDiT(warmup=2)]
    model, stack, *deep = fitted
    shared: list[Calibrated] = [stack, magnitude]
    if total > 2:  # a line takes two steps
        shared.append(diffcache.DPCache(computed=2, warmup=2))
    return [[model], shared, *([method] for method in (*deep, *others))]


def families(total: int, places: Sequence[Site], calibrated: Sequence[Calibrated]) -> list[Rungs]:
    """Return the families of a search; those that do best on most models stand first.

    `calibrated` are methods that `to_calibrate` returned, with tables, as far as they fit the model.
    """
    fitted = [method for method in calibrated if isinstance(method, (diffcache.FittedForecast, diffcache.DPCache))]
    rest = [method for method in calibrated if method not in fitted]
    others = (diffcache.StepMask(dynamic=False, order=1), diffcache.PAB(), diffcache.FasterCache(start=0.1))
    even = [_even(method, place, total) for method in FORECASTS for place in places]
    return [
        *(family for method in (*fitted, diffcache.Spectrum()) for family in _settings(method, total)),
        *(family for family in even if family.ladder),
        *(family for method in (*others, *GATES, *rest) for family in _settings(method, total)),
    ]


def _even(method: FeatureMethod, place: Site, total: int) -> Rungs:
    """Return the forecast of a method at a site for any number of steps, none where it has none."""
    parts = method.parts()
    name = "taylorseer" if isinstance(method, Combine) else method.name
    own = parts.feature == "output"  # of what the whole stack returns
    holds_many = isinstance(method, (diffcache.DMD, diffcache.HiCache, diffcache.FoCa))
    if (own and place is not parts.site) or (holds_many and place is Site.MODULE):
        return Rungs(name, [])
    instead = parts.instead
    if getattr(instead, "start", 0):  # of its own warm-up
        instead = dataclasses.replace(instead, start=0)  # type: ignore[type-var]
    ladder = []
    for count in range(1, total):
        when = Listed([number * total // count for number in range(count)], total)
        ladder.append(dataclasses.replace(parts, when=when, instead=instead, site=place))
    return Rungs(name, ladder)


def _settings(method: FeatureMethod, total: int) -> list[Rungs]:
    """Return the families of a method."""
    counts, intervals = range(1, total), range(total, 1, -1)
    if isinstance(method, diffcache.FittedForecast):
        ladders = [_with(method, "computed", counts, history=history) for history in (2, 3)]
    elif isinstance(method, diffcache.DPCache):
        ladders = [_with(method, "computed", counts[n - 1 :], warmup=n) for n in (3, 2)]
    elif isinstance(method, diffcache.BAC):
        ladders = [_with(method, "count", counts)]
    elif isinstance(method, (diffcache.ProfilingDiT, diffcache.FasterCache)):
        ladders = [_with(method, "every", intervals)]
    elif isinstance(method, diffcache.Spectrum):
        ladders = [_with(method, "window", WINDOWS), _with(method, "window", WINDOWS, warmup=2)]
    elif isinstance(method, diffcache.StepMask):
        ladders = [_with(method, "level", LEVELS[::-1])]
    elif isinstance(method, diffcache.PAB):
        ladders = [[diffcache.PAB(n, 2 * n, 3 * n, start=0.1, end=0.95) for n in range(6, 1, -1)]]
    else:
        ladders = [_with(method, "threshold", THRESHOLDS)]
    return [Rungs(method.name, ladder) for ladder in ladders if ladder]


def _with(method: FeatureMethod, name: str, values: Iterable[Any], **more: Any) -> Ladder:
    return [dataclasses.replace(method, **{name: value, **more}) for value in values]  # type: ignore[type-var]


def with_forecast(method: Method, other: Method) -> Combine | None:
    """Return a gate with the forecast of another method, None where it asks for more than reuse."""
    parts, forecast = reuse_of(method), reuse_of(other)
    if parts is None or forecast is None or method.abilities() != (parts,):
        return None
    return dataclasses.replace(parts, instead=forecast.instead)


def schedules(steps: tuple[int, ...], kinds: Sequence[Method], total: int) -> list[tuple[int, ...]]:
    """Return other schedules of as many steps: growing, regular, and those of fitted forecasts.

    The intervals of a growing one become longer. A regular one has a warm-up of 1 to 3 steps, then
    the shortest interval that fits.
    """
    found = [growing(len(steps), total, power) for power in (2.0, 1.5, 2.5)]
    for warmup in (1, 2, 3):
        regular = (steps_of(Every(every, warmup), total) for every in range(1, total + 1))
        found.append(next((other for other in regular if len(other) <= len(steps)), steps))
    for kind in kinds:
        if isinstance(kind, diffcache.FittedForecast):
            found.append(steps_listed(dataclasses.replace(kind, computed=len(steps)), total))
    return [other for other in dict.fromkeys(found) if len(other) == len(steps) and other != steps]


def growing(count: int, total: int, power: float) -> tuple[int, ...]:
    """Return steps of which step n of N is near `total (n / N) ** power`."""
    found: list[int] = []
    for number in range(count):
        least = found[-1] + 1 if found else 0
        found.append(max(least, round(total * (number / count) ** power)))
    return tuple(found)


def drops(steps: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the schedules in which one computed step but the first is dropped."""
    return [steps[:number] + steps[number + 1 :] for number in range(1, len(steps))]


def moves(steps: tuple[int, ...], total: int, together: int = 1) -> list[tuple[int, ...]]:
    """Return the schedules in which `together` adjacent computed steps are moved by one.

    The first step stays.
    """
    found = []
    for number, by in product(range(1, len(steps) - together + 1), (-1, 1)):
        moved = [step + by for step in steps[number : number + together]]
        other = (*steps[:number], *moved, *steps[number + together :])
        if other[-1] < total and other == tuple(sorted(set(other))):
            found.append(other)
    return found


def additions(steps: tuple[int, ...], total: int) -> list[tuple[int, ...]]:
    """Return the schedules in which one more step is computed."""
    return [tuple(sorted((*steps, step))) for step in range(total) if step not in steps]


def steps_listed(method: Method, total: int) -> tuple[int, ...]:
    """Return the computed steps of a method whose schedule is fixed, none of another."""
    reuse = reuse_of(method)
    if reuse is None or isinstance(reuse.when, Planned):  # the plan of a region leaves out steps by their times
        return ()
    if isinstance(reuse.when, Listed):
        return tuple(sorted({0, *reuse.when.steps}))
    try:
        return steps_of(reuse.when, total) if _is_fixed(reuse.when) else ()
    except AttachError:  # no mask for so few steps
        return ()


def _is_fixed(when: When) -> bool:
    """Return whether the number of the step alone decides, for all sites alike."""
    apart = when.by_branch or when.by_kind or when.sites
    return not (apart or when.reads_output or when.probe is not None)


def with_steps(method: Method, steps: tuple[int, ...], total: int) -> Combine:
    """Return a method on another schedule; fitted weights are fitted anew."""
    parts = reuse_of(method)
    assert parts is not None  # a method that reuses features
    instead = parts.instead
    if isinstance(method, diffcache.FittedForecast) and isinstance(method.tables, Tables):
        instead = refit(method, steps)
    return dataclasses.replace(parts, when=Listed(steps, total), instead=instead)


def refit(method: diffcache.FittedForecast, steps: tuple[int, ...]) -> Weighted:
    """Return the fitted forecast of a schedule."""
    tables = method.measured()
    fit = Fit(tables["products"], tables["moves"], method.history, method.ridge)
    return Weighted(fit.weights(steps), method.history)

"""Space of a search: ladders of settings, and schedules one step apart from another.

A ladder holds the settings of one kind of method, from the cheapest to the dearest:

- 1 to T - 1 computed steps at even distances with `Reuse`, `Taylor` of orders 1 and 2 and `Newton`
  of order 2, at the sites `model`, `stack` and `module`, and on UNets at `deep`;
- `FittedForecast` of 1 to T - 1 steps from 2 and from 3 computed features, at the same sites but
  `module`, whose features of a whole run are too many to calibrate on;
- thresholds from 1.5 to 0.02 of `FirstBlock`, `ConfidenceGatedTaylor` (warm-up of 3), `DBCache`
  (warm-up of 3, order 1), `SeaCache` (orders 0 and 1, `first="filtered"`), `TeaCache` and
  `MagCache` (`retention=0.05`, up to 5 skipped steps in a row);
- `BAC` with every `count`, and `ProfilingDiT` with every interval behind a warm-up of 2.

The best of the first two kinds are tried on other schedules of as many steps: warm-ups of 1 to 3
steps before an interval, which are those of `Interval` (FORA at `module`) and `TaylorSeer`, and
those that fitted forecasts choose; the best schedules with every other forecast at every other
site. Then single computed steps are dropped or added, and one or two adjacent ones moved by one.

Not in it: the site `block`, at which these forecasts do what they do at `stack` and hold more; the
site `run`, whose blocks have to be named; `CacheQuant` and `ERTACache`, which are calibrated for
every setting anew; `HarmoniCa`, which is trained; `RegionE`, which is for edits; `TemporalTable`,
which skips no step and goes with any choice. All of them can be given in `methods`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diffcache.features.bac import BAC
from diffcache.features.base import Instead, Method
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine, FeatureMethod, reuse_of
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.dbcache import DBCache
from diffcache.features.first_block import FirstBlock
from diffcache.features.fitted import FittedForecast, Weighted
from diffcache.features.magcache import MagCache
from diffcache.features.parts.fit import Fit
from diffcache.features.parts.instead import Newton, Reuse, Taylor
from diffcache.features.parts.when import Every, Listed, steps_of
from diffcache.features.profilingdit import ProfilingDiT
from diffcache.features.seacache import SeaCache
from diffcache.features.tables import Tables
from diffcache.features.teacache import TeaCache
from diffcache.step import Site

Ladder = Sequence[Method]
FORECASTS: tuple[Instead, ...] = (Taylor(1), Reuse(), Newton(2), Taylor(2))
GATES: tuple[FeatureMethod, ...] = (
    FirstBlock(),
    ConfidenceGatedTaylor(warmup=3),
    DBCache(warmup=3, order=1),
    SeaCache(first="filtered"),
    SeaCache(first="filtered", order=1),
)
THRESHOLDS = tuple(round(1.5 * 0.75**number, 3) for number in range(16))


def sites(is_unet: bool) -> tuple[Site, ...]:
    """Return where features are taken, first where a skipped step costs least."""
    return (Site.MODEL, Site.STACK, Site.MODULE, *([Site.DEEP] if is_unet else []))


def to_calibrate(places: Sequence[Site]) -> list[list[Calibrated]]:
    """Return the methods that need tables; those of a list share a pass over the prompts."""
    fitted = [FittedForecast(site=site) for site in places if site is not Site.MODULE]
    magnitude = MagCache(longest=5, retention=0.05)
    others: list[Calibrated] = [TeaCache(), BAC(count=1), ProfilingDiT(warmup=2)]
    model, stack, *deep = fitted
    return [[model], [stack, magnitude], *([method] for method in (*deep, *others))]


def ladders(total: int, places: Sequence[Site], calibrated: Sequence[Calibrated]) -> list[Ladder]:
    """Return the ladders of a search in its order.

    Args:
        total: Steps of a run.
        places: Sites of forecasts.
        calibrated: Methods that `to_calibrate` returned, with tables, as far as they fit the model.
    """
    even = [
        [Combine(Listed(_even(total, count), total), instead, site) for count in range(1, total)]
        for instead in FORECASTS
        for site in places
    ]
    fitted = [method for method in calibrated if isinstance(method, FittedForecast)]
    gates = [*GATES, *(method for method in calibrated if method not in fitted)]
    return [*even, *(ladder for method in (*fitted, *gates) for ladder in _settings(method, total))]


def _even(total: int, count: int) -> list[int]:
    return [number * total // count for number in range(count)]


def _settings(method: FeatureMethod, total: int) -> list[Ladder]:
    """Return the ladders of a method."""
    counts = range(1, total)
    if isinstance(method, FittedForecast):
        return [
            [dataclasses.replace(method, computed=count, history=history) for count in counts]
            for history in (2, 3)
        ]
    if isinstance(method, BAC):
        return [[dataclasses.replace(method, count=count) for count in counts]]
    if isinstance(method, ProfilingDiT):
        return [[dataclasses.replace(method, every=every) for every in range(total, 1, -1)]]
    return [[dataclasses.replace(method, threshold=value) for value in THRESHOLDS]]  # type: ignore[type-var]


def schedules(steps: tuple[int, ...], kinds: Sequence[Method], total: int) -> list[tuple[int, ...]]:
    """Return other schedules of as many steps: regular ones, and those of fitted forecasts.

    A regular one has a warm-up of 1 to 3 steps, then the shortest interval that fits.
    """
    found: list[tuple[int, ...]] = []
    for warmup in (1, 2, 3):
        regular = (steps_of(Every(every, warmup), total) for every in range(1, total + 1))
        found.append(next((other for other in regular if len(other) <= len(steps)), steps))
    for kind in kinds:
        if isinstance(kind, FittedForecast):
            found.append(steps_listed(dataclasses.replace(kind, computed=len(steps))))
    return [other for other in dict.fromkeys(found) if len(other) == len(steps) and other != steps]


def drops(steps: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the schedules in which one computed step but the first is dropped."""
    return [steps[:number] + steps[number + 1 :] for number in range(1, len(steps))]


def moves(steps: tuple[int, ...], total: int, together: int = 1) -> list[tuple[int, ...]]:
    """Return the schedules in which so many adjacent computed steps are moved by one.

    The first step stays.
    """
    moved = [
        (*steps[:number], *(step + by for step in steps[number : number + together]),
         *steps[number + together :])
        for number in range(1, len(steps) - together + 1)
        for by in (-1, 1)
    ]  # fmt: skip
    return [other for other in moved if other[-1] < total and _ascends(other)]


def _ascends(steps: tuple[int, ...]) -> bool:
    return steps == tuple(sorted(set(steps)))


def additions(steps: tuple[int, ...], total: int) -> list[tuple[int, ...]]:
    """Return the schedules in which one more step is computed."""
    return [tuple(sorted((*steps, step))) for step in range(total) if step not in steps]


def steps_listed(method: Method) -> tuple[int, ...]:
    """Return the computed steps of a method that lists them, none of another."""
    reuse = reuse_of(method)
    is_list = reuse is not None and isinstance(reuse.when, Listed)
    return tuple(sorted({0, *reuse.when.steps})) if is_list else ()  # type: ignore[union-attr]


def with_steps(method: Method, steps: tuple[int, ...], total: int) -> Combine:
    """Return a method on another schedule; fitted weights are fitted anew."""
    parts = reuse_of(method)
    assert parts is not None  # a method that reuses features
    instead = parts.instead
    if isinstance(method, FittedForecast) and isinstance(method.tables, Tables):
        instead = refit(method, steps)
    return dataclasses.replace(parts, when=Listed(steps, total), instead=instead)


def refit(method: FittedForecast, steps: tuple[int, ...]) -> Weighted:
    """Return the fitted forecast of a schedule."""
    tables = method.measured()
    fit = Fit(tables["products"], tables["moves"], method.history, method.ridge)
    return Weighted(fit.weights(steps), method.history)

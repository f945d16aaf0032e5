"""What a search tries: methods, their settings, sites and schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from diffcache.features.base import Instead, Method
from diffcache.features.combine import Combine, reuse_of
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.fitted import FittedForecast, Weighted
from diffcache.features.parts.fit import Fit
from diffcache.features.parts.instead import Newton, Taylor
from diffcache.features.parts.when import Every, Listed, steps_of
from diffcache.features.tables import Tables
from diffcache.step import Site

FORECASTS: tuple[Instead, ...] = (Taylor(1), Taylor(2), Newton(2))
SITES = (Site.STACK, Site.MODEL)
GATES = (0.05, 0.1, 0.2, 0.4)


def fitted(sites: Sequence[Site] = SITES) -> list[FittedForecast]:
    """Return the methods of the space that have to be calibrated first, one a site."""
    return [FittedForecast(site=site) for site in sites]


def counts_for(total: int, least: float, most: float) -> list[int]:
    """Return numbers of computed steps whose share of all lies between two bounds."""
    lowest, highest = max(1, math.ceil(least * total)), max(1, math.floor(most * total))
    return list(range(min(lowest, highest), highest + 1))


def schedules(total: int, computed: int) -> Iterator[tuple[int, ...]]:
    """Yield regular schedules of `computed` steps: warm-ups of 1 to 3 steps, then an interval."""
    seen = set()
    for warmup in (1, 2, 3):
        for every in range(1, total + 1):
            steps = steps_of(Every(every, warmup), total)
            if len(steps) == computed and steps not in seen:
                seen.add(steps)
                yield steps


def candidates(
    total: int, counts: Sequence[int], calibrated: Sequence[FittedForecast]
) -> list[Method]:
    """Return the methods that a search tries first.

    Args:
        total: Steps of a run.
        counts: Numbers of computed steps.
        calibrated: With tables.
    """
    found: list[Method] = []
    for computed in reversed(counts):
        listed = dict.fromkeys(schedules(total, computed))
        for method in calibrated:
            for history in (2, 3):
                fitting = dataclasses.replace(method, computed=computed, history=history)
                found.append(fitting)
                when = fitting.parts().when
                assert isinstance(when, Listed)
                listed[tuple(sorted({0, *when.steps}))] = None
        found += [
            Combine(Listed(steps, total), forecast, site)
            for steps in listed
            for site in SITES
            for forecast in FORECASTS
        ]
    return found


def gates() -> list[Method]:
    """Return methods whose cost is known only when they ran."""
    return [
        method
        for threshold in GATES
        for method in (FirstBlock(threshold), ConfidenceGatedTaylor(threshold))
    ]


def moves(steps: Sequence[int], total: int) -> list[tuple[int, ...]]:
    """Return the schedules in which one computed step but the first is moved by one."""
    found = []
    for number, step in enumerate(steps[1:], start=1):
        for moved in (step - 1, step + 1):
            if 0 < moved < total and moved not in steps:
                found.append(tuple(sorted((*steps[:number], moved, *steps[number + 1 :]))))
    return found


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

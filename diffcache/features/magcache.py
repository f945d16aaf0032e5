"""Skip while the residual's calibrated magnitude says that reuse errs little (MagCache)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Change, When, check_int, is_number
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every, LastComputed
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.presets.published import published_settings
from diffcache.ranges import Count, Share
from diffcache.step import Step


@dataclass(frozen=True)
class Magnitude(When):
    """Skip while products of magnitude ratios stay near 1.

    With `p(k)` the product of the ratios of the `k` steps after the last computed one, a step is
    skipped while the sum of `|1 - p(k)|` over them is below `threshold` and they are no more than
    `longest`. The decisions follow from the ratios and the step alone.

    Args:
        ratios: Norm of the residual of every step over that of the step before: one list for all
            guidance branches, or one for each.
        threshold: Sums below it skip; 0 turns the cache off.
        longest: Steps that are skipped in a row at most.
        retention: First part of the run that is always computed, 0 to 1.
        always: Positions in a list of ratios whose steps are always computed.
        by_branch: Whether every guidance branch decides for itself, as lists of its own ask for.
    """

    state: ClassVar[type] = LastComputed

    ratios: tuple[tuple[float, ...], ...]
    threshold: Change
    longest: Count
    retention: Share
    always: tuple[int, ...] = ()
    by_branch: bool = False

    def check(self) -> None:
        """Raise ValueError if a step that is always computed has no ratio."""
        count = len(self.ratios[0])
        if any(place >= count for place in self.always):
            raise ValueError(f"always={self.always!r}: must be below {count}, as many as ratios")

    def should_compute(self, state: LastComputed, step: Step, probe: Tensor | None) -> bool:
        """Return whether the summed error reached the threshold, or the limit the row of skips."""
        ratios = self._ratios(step.branch)
        # Of two experts the ratios are those of the whole run; each keeps the first part of its own steps.
        whole = step.before + step.total if step.total else len(ratios)
        now = step.before + step.index
        kept = int(self.retention * (whole - step.before) + 0.5)
        if state.index is None or step.index < kept or step.index - state.index > self.longest:
            return True
        if now < whole and place_of(now, whole, len(ratios)) in self.always:
            return True
        product, error = 1.0, 0.0
        for index in range(max(state.index + 1, kept), step.index + 1):
            product *= ratio_at(ratios, step.before + index, whole)
            error += abs(1 - product)
        return not error < self.threshold

    def computed(self, state: LastComputed, step: Step, probe: Tensor | None) -> None:
        """Start the product anew."""
        state.index = step.index

    def _ratios(self, branch: int) -> tuple[float, ...]:
        """Return the ratios of a guidance branch."""
        if len(self.ratios) == 1:
            return self.ratios[0]
        if branch >= len(self.ratios):
            raise AttachError(
                f"ratios: lists for {len(self.ratios)} guidance branches, and this is branch "
                f"{branch + 1} of the run; give one for each, or one for all"
            )
        return self.ratios[branch]


def place_of(index: int, total: int, count: int) -> int:
    """Return which of `count` ratios is that of step `index` of `total`, the nearest."""
    if total == count:
        return index
    return count - 1 if total == 1 else round(index * (count - 1) / (total - 1))


def ratio_at(ratios: tuple[float, ...], index: int, total: int) -> float:
    """Return the ratio of step `index` of `total`: that of the nearest step of the calibration.

    Beyond the run, whose length nobody may have said, it is 1.
    """
    return 1.0 if index >= total else ratios[place_of(index, total, len(ratios))]


def _by_branch(ratios: tuple[float, ...], branches: int, **settings: Any) -> dict[str, Any]:
    """Return published settings with the ratios of every branch apart, the first of each 1."""
    lists = tuple((1.0, *ratios[branch::branches]) for branch in range(branches))
    return {**settings, "ratios": lists if branches > 1 else lists[0]}


@dataclass(frozen=True)
class MagCache(Calibrated):
    """Reuse the stack's residual while its magnitude, known from a calibration, hardly changes.

    Reference: MagCache, arXiv 2506.09045, section 3 (magnitude law, error model and adaptive
    caching), with the schedule of its released code as diffusers has it. Differs: a sum that
    equals the threshold is computed, so that 0 turns the cache off; the retained part is rounded
    to the nearest step, as in the scripts for images, where those for videos round down; the
    ratios of a calibration are means over its prompts and guidance branches, and over the tokens
    of all streams; each list of blocks keeps its own residual.

    The official files leave out the first ratio and prepend `[1.0]`. Those for Wan and Qwen-Image
    hold two branches in turn, after `[1.0] * 2`: pass `ratios=(both[0::2], both[1::2])`. The
    script for FLUX never skips the step at position 11 of its 28 ratios: pass `always=(11,)`.

    Args:
        threshold: Smallest summed error that is computed; dimensionless; 0 turns the cache off.
            0.06 to 0.24.
        longest: Steps that are skipped in a row at most, 2 to 6 in the paper.
        retention: First part of the run that is always computed, 0 to 1.
        ratios: Published ratios of a model of the same family, one a step, the first 1.0; or a
            list of them for every guidance branch in the order of the calls, each of which then
            decides for itself. Runs of another length take those of the nearest steps; of two
            experts, which share a run, each takes those of its own steps. None takes those of the
            tables.
        tables: Tables of `diffcache.calibrate`, or a file it wrote; for runs of any length too.
        always: Positions in the list of ratios, from 0, whose steps are always computed; at
            another number of steps those that take these ratios.
        model: Model that the ratios were published for, as `published` names it; others are
            refused. Empty for any.

    Raises:
        ValueError: If ratios and tables are given, or ratios are no such numbers.
        TablesError: If the tables are another method's.
        AttachError: If the ratios are for other models.

    Examples:
        >>> method = diffcache.calibrate(pipe, MagCache(), prompts=["a cat"])  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, method)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, MagCache.published("flux.1-dev"))  # doctest: +SKIP
    """

    numbers: ClassVar[str] = "ratios"
    publishes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: _by_branch(**entry) for name, entry in published_settings("magcache").items()
    }
    collected_by: ClassVar[str] = "diffcache.offline.magcache_collect:Ratios"
    schema: ClassVar[Schema] = Schema({"ratios": Entry(("steps",), low=0.01, high=100)})

    threshold: Change = 0.06
    longest: Count = 3
    retention: Share = 0.2
    ratios: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    tables: Tables | str | None = None
    always: tuple[int, ...] | int = ()
    model: str = ""

    def check(self) -> None:
        """Raise unless ratios and tables are such, and one of them is given at most."""
        object.__setattr__(self, "always", check_always(self.always))
        super().check()
        if self.ratios is not None:
            if self.tables is not None:
                raise ValueError("ratios and tables: give one of them")
            object.__setattr__(self, "ratios", check_ratios(self.ratios))
            self.parts()

    @property
    def total(self) -> None:
        """None: a run of another length takes the ratios of the nearest steps."""
        return None

    def parts(self) -> Combine:
        """Return the schedule that follows from the ratios, and reuse."""
        if self.threshold == 0:
            return Combine(Every(1), Reuse())
        ratios: Any = self.ratios or tuple(self.measured()["ratios"].tolist())
        lists = ratios if isinstance(ratios[0], tuple) else (ratios,)
        always = check_always(self.always)
        when = Magnitude(lists, self.threshold, self.longest, self.retention, always, len(lists) > 1)
        return Combine(when, Reuse())


def check_ratios(values: Any) -> Any:
    """Return ratios as a tuple, or as a tuple of them for every guidance branch.

    Raises ValueError if there are none, one is no positive finite number, the first is not 1, or
    the lists of branches differ in length.
    """
    nested = isinstance(values, (list, tuple)) and values and not is_number(values[0])
    try:
        lists = tuple(tuple(float(value) for value in row) for row in (values if nested else [values]))
    except (TypeError, ValueError):
        lists = ((),)
    if not all(row and all(0 < value < math.inf for value in row) for row in lists):
        raise ValueError(f"ratios={values!r}: must be positive finite numbers, one a step")
    if any(row[0] != 1 for row in lists):
        raise ValueError(
            f"ratios={values!r}: must begin with 1.0, that of the first step, which the lists of "
            "the official files leave out: pass (1.0, *ratios)"
        )
    if len({len(row) for row in lists}) > 1:
        raise ValueError(f"ratios={values!r}: must be as many for every guidance branch")
    return lists if nested else lists[0]


def check_always(values: Any) -> tuple[int, ...]:
    """Return positions in a list of ratios, whole numbers of at least 0, as a tuple; one may stand for itself."""
    places = tuple(values) if isinstance(values, (list, tuple)) else (values,)
    for place in places:
        check_int("always", place, 0)
    return places

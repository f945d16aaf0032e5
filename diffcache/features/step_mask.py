"""Skip at most the steps of a published mask, and those that a gate lets pass (cache-dit's SCM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Annotated, Any, Literal, get_args

from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Change, Order, Probe, When, length_of
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Taylor
from diffcache.features.parts.when import Gate, LastComputed
from diffcache.ranges import Range
from diffcache.step import Step

Level = Literal["slow", "medium", "fast", "ultra"]
LEVELS: tuple[Level, ...] = get_args(Level)
# Steps of a run -> of each level in their order, rows of computed and of skipped steps in turn.
# Source: `steps_mask` of cache-dit 1.5, Apache-2.0. Runs of other lengths are cut or grown.
_BINS: dict[int, tuple[tuple[Sequence[int], Sequence[int]], ...]] = {
    4: (((2, 1), (1,)),) * 4,
    6: (((3, 1), (2,)),) * 4,
    8: (((5, 1, 1), (1,)), ((4, 1, 1), (1, 1)), ((3, 1, 1), (1, 2)), ((2, 1, 1), (2, 2))),
    9: (((5, 2, 1), (1,)), ((5, 1, 1), (1, 1)), ((4, 1, 1), (1, 2)), ((3, 1, 1), (2, 2))),
    15: (
        ((4, 2, 2, 2, 1), (1, 1, 1, 1)),
        ((4, 2, 1, 1, 1), (1, 1, 2, 2)),
        ((3, 1, 1, 1, 1), (1, 2, 2, 3)),
        ((2, 1, 1, 1, 1), (1, 2, 3, 3)),
    ),
    28: (
        ((8, 3, 3, 2, 1, 1), (1, 2, 2, 2, 3)),
        ((6, 2, 2, 2, 2, 1), (1, 3, 3, 3, 3)),
        ((6, 1, 1, 1, 1, 1), (1, 3, 4, 5, 4)),
        ((4, 1, 1, 1, 1), (2, 5, 6, 7)),
    ),
}


@lru_cache(maxsize=256)
def mask_of(level: Level, total: int) -> tuple[bool, ...]:
    """Return which steps of a run are computed by the published mask; raise AttachError if there is none."""
    if total < 8 and total not in _BINS:
        raise AttachError(f"{total} steps: masks are for 4, 6 and 8 steps or more; use Interval")
    known = min(28, next(n for n in (4, 6, 8, 9, 15, 28, total) if n >= total))
    rows = _BINS[known][LEVELS.index(level)]
    computed, skipped = list(rows[0]), list(rows[1])
    while total > 28 and sum(computed) + sum(skipped) < total:
        _grow(computed, skipped, rows, total)
    while sum(computed) + sum(skipped) > total:  # from the end, in turn
        for bins in (skipped, computed):
            if bins and sum(computed) + sum(skipped) > total:
                bins[-1] -= 1
                if not bins[-1]:
                    bins.pop()
    mask: list[bool] = []
    for run, row in zip_longest(computed, skipped, fillvalue=0):
        mask += [True] * run + [False] * row
    return (*mask[: total - 1], True)


def _grow(computed: list[int], skipped: list[int], rows: Any, total: int) -> None:
    """Lengthen the rows by the share that they have in a run of 28 steps, until they suffice."""
    for place in range(min(map(len, rows))):
        for bins, base in zip((computed, skipped), rows, strict=True):
            bins[place] += max(int(base[place] * (total / 28 * 0.5)), 1)
            if sum(computed) + sum(skipped) >= total:
                return
    computed[-1] += 1


@dataclass(frozen=True)
class Masked(When):
    """Compute the steps of a mask, and of the others those that a gate wants.

    Args:
        level: Name of the mask.
        gate: Gate of the other steps; None skips them all.
    """

    level: Level
    gate: Gate | None

    def check(self) -> None:
        """Let branches decide as the gate does."""
        object.__setattr__(self, "by_branch", self.gate is not None and self.gate.by_branch)

    @property
    def probe(self) -> Probe | None:
        """Probe that the gate looks at."""
        return None if self.gate is None else self.gate.probe

    def init(self) -> Any:
        """Return an empty run."""
        return LastComputed() if self.gate is None else self.gate.init()

    def should_compute(self, state: Any, step: Step, probe: Tensor | None) -> bool:
        """Return whether the mask or the gate wants the step; raise AttachError if nobody said how long the run is."""
        total = length_of(step, f"level={self.level!r}: a mask is for runs whose length is known")
        mask = mask_of(self.level, total)
        if state.index is None or step.index >= len(mask) or mask[step.index]:
            return True
        return self.gate is not None and self.gate.should_compute(state, step, probe)

    def computed(self, state: Any, step: Step, probe: Tensor | None) -> None:
        """Note the step, and let the gate know."""
        state.index = step.index
        if self.gate is not None:
            self.gate.computed(state, step, probe)

    def held(self, state: Any) -> list[Tensor]:
        """Return the tensors that the gate keeps."""
        return [] if self.gate is None else self.gate.held(state)


@dataclass(frozen=True)
class StepMask(FeatureMethod):
    """Compute the steps of a published mask, and of the others those that changed too much.

    Reference: step computation masks of cache-dit (`steps_mask`), whose four levels leave out from
    10 to 20 of 28 steps; masks of other lengths are cut or grown as there. With `dynamic` the steps
    that the mask leaves out are skipped only while DBCache's gate lets them pass; without it they
    are all skipped. The lead blocks always run, as in cache-dit. Differs: as DBCache does.

    Args:
        level: `slow`, `medium`, `fast` or `ultra`.
        dynamic: Whether a gate has a say in the steps that the mask leaves out.
        threshold: Largest change of the lead's residual still taken as none; dimensionless.
        lead: First blocks that always run, at least 1.
        order: Order of the forecast of the skipped residuals, 0 (reuse) to 4.
        by_branch: Whether every guidance branch decides for itself.
    """

    level: Level = "medium"
    dynamic: bool = True
    threshold: Change = 0.24
    lead: Annotated[int, Range(1), " (the gate looks at the lead blocks)"] = 1
    order: Order = 0
    by_branch: bool = False

    def parts(self) -> Combine:
        """Return the mask with the gate inside, and the forecast behind it."""
        gate = Gate(self.threshold, by_branch=self.by_branch)
        when = Masked(self.level, gate if self.dynamic else None)
        return Combine(when, Taylor(self.order), lead=self.lead)

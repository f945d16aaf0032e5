"""Lead and tail blocks that always run around blocks that a gate skips (DBCache)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from diffcache.features.base import Change, Order, Probe, Warmup, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Taylor
from diffcache.features.parts.when import Gate
from diffcache.ranges import Count, Range, Whole
from diffcache.step import Step


@dataclass
class BudgetState:
    """The state of the gate, and how many steps were computed."""

    gate: Any
    computed: int = 0
    first: int = 0  # index of the first of them, which a late guidance branch has not at 0
    index: int = -1


@dataclass(frozen=True)
class Limited(When):
    """A gate with limits: the most steps that are skipped in a row, `longest`, and in all, `skips`.

    Settings are those of `DBCache`; `gate` decides where they leave it a choice.
    """

    gate: Gate
    longest: Count | None = None
    skips: Count | None = None

    def check(self) -> None:
        """Let branches decide as the gate does."""
        object.__setattr__(self, "by_branch", self.gate.by_branch)

    @property
    def probe(self) -> Probe:
        """Probe that the gate looks at."""
        return self.gate.probe

    def init(self) -> BudgetState:
        """Return an empty run."""
        return BudgetState(self.gate.init())

    def should_compute(self, state: BudgetState, step: Step, probe: Tensor | None) -> bool:
        """Return whether a limit is reached or the gate is open."""
        if self.longest is not None and step.index - state.index > self.longest:
            return True
        if self.skips is not None and step.index - state.first - state.computed >= self.skips:
            return True
        return self.gate.should_compute(state.gate, step, probe)

    def computed(self, state: BudgetState, step: Step, probe: Tensor | None) -> None:
        """Count the step and let the gate know."""
        if not state.computed:
            state.first = step.index
        state.computed, state.index = state.computed + 1, step.index
        self.gate.computed(state.gate, step, probe)

    def held(self, state: BudgetState) -> list[Tensor]:
        """Return the tensors that the gate keeps."""
        return self.gate.held(state.gate)


@dataclass(frozen=True)
class DBCache(FeatureMethod):
    """Skip the blocks between lead and tail while the residual of the lead hardly changed.

    The first `lead` blocks always run, and what they add to the stream is compared with what they
    added at the last computed step, `mean|new - old| / mean|old|`; below `threshold` the blocks
    after them are skipped, their residuals reused or forecast, and the last `tail` blocks run on
    the result. Reference: DBCache of cache-dit, https://github.com/vipshop/cache-dit, whose
    `F8B0` is `lead=8, tail=0`. Differs: the first guidance branch decides for all, unless
    `by_branch` is set; the comparison is in float32 over all tokens; each list of blocks keeps its
    own residual.

    Args:
        threshold: Largest change still taken as none (`residual_diff_threshold`); dimensionless;
            0 turns the cache off. 0.08 to 0.2 is usual.
        lead: First blocks that always run (`Fn_compute_blocks`), at least 1.
        tail: Last blocks that always run (`Bn_compute_blocks`).
        warmup: First steps that are always computed (`max_warmup_steps`), at least 1.
        longest: Steps that are skipped in a row at most (`max_continuous_cached_steps`).
        skips: Steps that are skipped in a run at most (`max_cached_steps`).
        order: Order of the forecast of the skipped residuals, 0 (reuse) to 4 (`taylorseer_order`).
        by_branch: Whether every guidance branch decides for itself (`cfg_diff_compute_separate`).
    """

    threshold: Change = 0.08
    lead: Annotated[int, Range(1), " (the gate looks at the lead blocks)"] = 1
    tail: Whole = 0
    warmup: Warmup = 8
    longest: Count | None = None
    skips: Count | None = None
    order: Order = 0
    by_branch: bool = False

    def parts(self) -> Combine:
        """Return the limited gate on the lead's residual, and the forecast behind it."""
        gate = Gate(self.threshold, self.warmup, by_branch=self.by_branch)
        when = Limited(gate, self.longest, self.skips)
        return Combine(when, Taylor(self.order), lead=self.lead, tail=self.tail)

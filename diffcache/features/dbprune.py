"""Skip single blocks, each while its own input hardly changed (DBPrune of cache-dit)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from diffcache.features.base import Change, Order, Probe, Warmup, When
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.instead import Taylor
from diffcache.features.parts.when import relative_l1
from diffcache.ranges import Whole
from diffcache.step import Site, Step


@dataclass(frozen=True)
class BlockGate(When):
    """Skip a block while its input is close to that at its own last computed step.

    Settings are those of `DBPrune`.
    """

    state: ClassVar[type] = dict

    threshold: Change
    warmup: Warmup = 1
    by_branch: ClassVar[bool] = True  # type: ignore[misc]

    @property
    def probe(self) -> Probe:
        """Return that the gate looks at the input of every block."""
        return "input"

    def should_compute(self, state: dict[str, Tensor], step: Step, probe: Tensor | None) -> bool:
        """Return True: the blocks decide."""
        return True

    def skips_block(self, state: dict[str, Tensor], step: Step, block: str, value: Tensor) -> bool:
        """Return whether the input of a block hardly changed."""
        before = state.get(block)
        if step.index < self.warmup or before is None or before.shape != value.shape:
            return False
        return relative_l1(before, value, "forecast", step.ranks) < self.threshold

    def computed_block(self, state: dict[str, Tensor], block: str, value: Tensor) -> None:
        """Keep the input of a block that is computed."""
        state[block] = value.detach().clone()

    def held(self, state: dict[str, Tensor]) -> list[Tensor]:
        """Return the inputs."""
        return list(state.values())


@dataclass(frozen=True)
class DBPrune(FeatureMethod):
    """Skip every block whose own input hardly changed since it was last computed.

    The input of each block is compared with that at the block's own last computed step,
    `mean|new - old| / mean|old|`; below `threshold` what the block added then is added again. The
    gate waits for the device once a block, and holds an input beside the residuals of each.
    Reference: DBPrune (dynamic block pruning) of cache-dit, whose pictures it gives on FLUX, SD 3
    and CogVideoX. Differs: guidance branches always decide apart; the comparison is in float32; the
    threshold is fixed (`enable_dynamic_prune_threshold=False`); `lead` and `tail` count the blocks
    of the whole model, not those of each list.

    Args:
        threshold: Largest change still taken as none (`residual_diff_threshold`); dimensionless;
            0 turns the cache off.
        lead: First blocks that always run (`Fn_compute_blocks`).
        tail: Last blocks that always run (`Bn_compute_blocks`).
        warmup: First steps in which every block is computed (`max_warmup_steps`), at least 1.
        order: Order of the forecast of a block's residuals, 0 (reuse) to 4.
    """

    threshold: Change = 0.05
    lead: Whole = 0
    tail: Whole = 0
    warmup: Warmup = 8
    order: Order = 0

    def parts(self) -> Combine:
        """Return a gate on the input of every block, and the forecast behind it."""
        when = BlockGate(self.threshold, self.warmup)
        return Combine(when, Taylor(self.order), Site.BLOCK, lead=self.lead, tail=self.tail)

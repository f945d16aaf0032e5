"""More slots for layers whose attention is spread out and shifts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.budget import Budget, Size, check_size, slots_for
from diffcache.kv.observe import Observation
from diffcache.kv.score.attention import window_variance


@dataclass(frozen=True)
class EntropyVariance(Budget):
    """Slots in proportion to a layer's preference, entropy^(1 / tau1) * variance^(1 / tau2).

    Both are of how the last queries attend to the slots before them: the entropy summed over heads
    and queries, the variance over queries summed over heads and slots. Every layer gets its window,
    and a share of what that leaves of the sizes of all layers, rounded down; what a layer cannot
    use, and then what rounding left, goes to the others in equal parts, the first ones first. All
    heads of a layer get the same.

    Args:
        size: Mean slots of a row, or a share of the tokens it has seen.
        window: The last queries, as many as the scorer keeps; and the least slots of a layer.
        tau1: Temperature of the entropy; the paper fits it to each model.
        tau2: Temperature of the variance; the paper fits it to each model.

    Raises:
        ValueError: If a setting is out of its range.

    Reference: CAKE, arXiv 2503.12491.
    """

    size: Size
    window: int = 32
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        check_size("size", self.size)
        if self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1 query")
        for name in ("tau1", "tau2"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")

    def allot(self, scores: Sequence[Tensor], seen: Sequence[Observation]) -> list[Tensor]:
        """Return the same slots for all heads of a layer, with an exact total."""
        held = torch.stack([each.lengths for each in seen])
        mean = torch.stack([slots_for(self.size, each.tokens) for each in seen]).minimum(held)
        window = held.clamp_max(self.window).minimum(mean)
        total, room = (mean - window).sum(0), held - window
        weights = torch.stack([self.preference(each) for each in seen])[..., None]
        whole = weights.sum(0)
        share = (weights / whole).where(whole > 0, 1 / len(seen))
        slots = (share * total + 1e-9).floor().long()
        over = (slots - room).clamp_min(0).sum(0)
        slots = _evened(slots.minimum(room), over, room)
        slots = _evened(slots, total - slots.sum(0), room)
        while bool((slots > room).any()):
            slots = slots.minimum(room)
            slots = _evened(slots, total - slots.sum(0), room)
        return list(slots + window)

    def preference(self, seen: Observation) -> Tensor:
        """Return what a layer asks for, float64 [B]; dimensionless."""
        probs = seen.probs(self.window)[..., : max(seen.slots.width - self.window, 0)].double()
        entropy: Tensor = torch.special.entr(probs).sum((1, 2, 3, 4))
        variance = window_variance(seen, probs).sum((1, 2, 3))
        return entropy.pow(1 / self.tau1) * variance.pow(1 / self.tau2)


def _evened(slots: Tensor, more: Tensor, room: Tensor) -> Tensor:
    """Return slots [L, B, H] to which `more` [B, H] was added, evenly where there is room."""
    takes = slots < room
    count = takes.sum(0).clamp_min(1)
    first = takes.cumsum(0) <= more % count
    return slots + takes * (more // count + first.long())

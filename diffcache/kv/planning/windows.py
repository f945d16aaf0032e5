"""Plans that keep whole windows of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.plan import DROP, KEEP, Planner, ranks


@dataclass(frozen=True)
class Windows(Planner):
    """Keep the last tokens, and before them whole windows, the best ones first.

    The tokens before the last `recent` are cut into windows of `size` from the first token of a
    row on; the last window may be shorter. As many windows are kept as fit the budget.

    Reference: WindowKV, arXiv 2503.17922, section 2.2.1, equation 4: a window is worth the mean of
    all its tokens where a task looks for a place (there called localization), and the mean of its
    best ones where it gathers from all over (aggregation).

    Args:
        size: Tokens of a window.
        recent: Last tokens, always kept (the window whose queries score).
        best: Number of best tokens of a window that count; None for all of them.

    Raises:
        ValueError: If a number is out of range.
    """

    size: int = 8
    recent: int = 8
    best: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.recent < 0:
            raise ValueError(f"size={self.size}, recent={self.recent}: must be at least 1 and 0")
        if self.best is not None and not 1 <= self.best <= self.size:
            raise ValueError(f"best={self.best}: must be 1 to size={self.size} tokens, or None")

    def __call__(self, score: Tensor, budget: Tensor, seen: Observation) -> Tensor:
        """Return what is kept and what is dropped."""
        width = score.shape[-1]
        place = torch.arange(width, device=score.device)
        from_first = place - seen.pad[..., None]
        valid = seen.valid.expand_as(score)
        recent = (place >= width - self.recent) & valid
        inner = valid & ~recent
        # The same slots from the left, so that every row begins a window where it begins.
        shift = (place + seen.pad[..., None]).clamp_max(width - 1)
        there = inner.gather(2, shift) & (place < seen.lengths[..., None])
        left = score.gather(2, shift).masked_fill(~there, float("-inf"))
        worth = self._worth(left)
        room = (budget - recent.sum(-1)).clamp_min(0) // self.size
        chosen = (ranks(worth) < room[..., None]) & (worth > float("-inf"))
        window = (from_first.clamp_min(0) // self.size).clamp_max(worth.shape[-1] - 1)
        keep = recent | (inner & chosen.gather(2, window))
        keep = keep.where((budget < seen.lengths)[..., None], valid)
        short = self.recent > budget[..., None]  # not even the last tokens fit
        latest = (place >= width - budget[..., None]) & valid
        keep = keep.where(~short | (budget >= seen.lengths)[..., None], latest)
        return torch.where(keep, KEEP, DROP).to(torch.int8)

    def _worth(self, score: Tensor) -> Tensor:
        """Return the worth of every window, [B, H, n]; -inf where it has no tokens."""
        missing = -score.shape[-1] % self.size
        score = torch.nn.functional.pad(score, (0, missing), value=float("-inf"))
        each = score.unflatten(2, (-1, self.size))
        if self.best is not None:
            each = each.topk(self.best, -1).values
        count = (each > float("-inf")).sum(-1)
        total = each.masked_fill(each == float("-inf"), 0.0).sum(-1)
        mean: Tensor = total / count.clamp_min(1)
        return mean.masked_fill(count == 0, float("-inf"))

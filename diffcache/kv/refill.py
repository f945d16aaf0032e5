"""Drop a few slots of each row by putting the last ones in their places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Refill:
    """Which of the last slots go where; a slot that goes itself stays put and is cut off.

    Attributes:
        source: int64 [B, 1 or H, n], slots that are read, the last of their rows.
        target: int64 [B, 1 or H, n], slots that are written, each once.
    """

    source: Tensor
    target: Tensor

    @classmethod
    def of(cls, index: Tensor, width: int) -> Refill:
        """Return what fills the places of slots that go.

        Args:
            index: int64 [B, 1 or H, n], different slots of each row.
            width: Slots of a row; the last n are free afterwards.
        """
        count = index.shape[2]
        last = torch.arange(width - count, width, device=index.device)
        if count == 1:
            return cls(last.expand_as(index), index)
        # Of the last slots those that stay move, in order, into the places before them; as many
        # places as slots are left, which are those of the last slots that go, in the same order.
        target = index.sort(-1).values
        goes = (target[..., None, :] == last[:, None]).any(-1)
        order = torch.argsort(goes.to(torch.int8), dim=-1, stable=True)
        return cls(last.expand_as(index).gather(-1, order), target)

    @property
    def count(self) -> int:
        """Slots of a row that go."""
        return self.target.shape[2]

    @property
    def heads(self) -> int:
        """1 where all heads drop the same slots, or H."""
        return self.target.shape[1]

    def apply(self, tensor: Tensor) -> Tensor:
        """Move what is known of slots, in place, and return it.

        Args:
            tensor: [B, H, S, ...], or [B, 1, S, ...] where all heads drop the same slots.
        """
        moved = tensor.gather(2, _wide(self.source, tensor))
        return tensor.scatter_(2, _wide(self.target, tensor), moved)


def _wide(index: Tensor, tensor: Tensor) -> Tensor:
    """Return slots [B, 1 or H, n] as every channel of a tensor [B, H, S, ...] is indexed."""
    rest = tensor.shape[3:]
    index = index.view(*index.shape, *[1] * len(rest)) if rest else index
    return index.expand(-1, tensor.shape[1], -1, *rest)

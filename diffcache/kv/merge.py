"""Mergers: what kept slots take over from those that go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from diffcache.kv.observe import Observation
from diffcache.kv.slots import Slots


class Merger(ABC):
    """Merge the slots that go into those that are kept; a frozen dataclass of settings.

    Attributes:
        space: Keys are merged as they are read, rotated to their positions (`"post"`), or as they
            are before rotation (`"pre"`). Keys rotated by different angles cancel in part when
            they are added up: merging them loses norm, merging unrotated ones does not.
    """

    space: Literal["post", "pre"] = "post"

    @abstractmethod
    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with what was merged into them, and the plan.

        Args:
            seen: The layer; its keys are rotated to their positions, or unrotated, as `space` says.
            score: [B, H, S].
            plan: int8 [B, H, S]; -1 where a slot goes.

        Returns:
            Slots as wide as `seen.slots`, keys rotated like those; and a plan, which may differ.
        """


def check_space(space: str) -> None:
    """Raise unless it is a space that keys are merged in.

    Raises:
        ValueError: If it is neither.
    """
    if space not in ("post", "pre"):
        raise ValueError(f"space={space!r}: must be 'post' or 'pre', after or before rotation")

"""Mergers: kept slots take over keys and values from those that go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.codec.base import work_dtype
from diffcache.kv.observe import Observation
from diffcache.kv.plan import KEEP
from diffcache.kv.settings import Settings
from diffcache.kv.slots import Slots


class Merger(Settings, ABC):
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


@dataclass(frozen=True)
class Compensation(Merger):
    """Put the mean of all dropped keys and values in the place of the last of them.

    The slot counts in the softmax as many times as tokens were dropped, those of earlier times
    included; it comes on top of the budget. Attention is exact if the dropped tokens were alike.

    Reference: RazorAttention, arXiv 2407.15891 (compensation token).
    """

    def __call__(self, seen: Observation, score: Tensor, plan: Tensor) -> tuple[Slots, Tensor]:
        """Return the slots with one that stands for many, and the plan that keeps it."""
        slots = seen.slots
        gone = (plan < KEEP) & slots.valid
        if not bool(gone.any()):
            return slots, plan
        logn = slots.column("logn").expand(gone.shape).to(work_dtype(slots.k.dtype))
        place = torch.arange(gone.shape[-1], device=gone.device)
        host = (place == (place * gone).amax(-1, keepdim=True)) & gone
        weight = logn.masked_fill(~gone, float("-inf"))
        total = weight.logsumexp(-1, keepdim=True)
        weight = weight.softmax(-1).nan_to_num(0.0)[..., None]
        k, v = ((weight * x).sum(2, keepdim=True).to(x.dtype).where(host[..., None], x) for x in (slots.k, slots.v))
        meta = {**slots.meta, "logn": total.where(host, logn).float()}
        return Slots(k, v, meta), plan.masked_fill(host, KEEP)

"""Credit decoding: a token that stays the model's choice from step to step becomes surer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from diffcache.dllm.rules import Threshold
from diffcache.dllm.state import RowState
from diffcache.ranges import Range, Share


@dataclass(frozen=True)
class Credit(Threshold):
    """Commit every mask that is confident enough, by logits raised for tokens chosen before.

    At each step the most probable token of every open mask gains its probability to the power of
    `boost` as credit, after all credit of the block has shrunk by `decay`. `weight` times the
    logarithm of 1 and the credit is added to the logits that tokens and confidence are taken from.
    A new block has no credit.

    Departures: commits are those of `Threshold`; where no mask is confident the published code
    commits all within 1e-5 of the best one. Only masks that were computed and may be committed gain
    credit.

    Args:
        threshold: Least confidence, dimensionless, 0 to 1; 0 commits all masks at once.
        weight: Weight of the credit, at least 0; 0 for none.
        boost: Power of the probability that is gained, at least 0.
        decay: Part of the credit that is left after a step, 0 to 1.

    Reference: dInfer, arXiv 2510.08666, and its released code (`CreditThresholdParallelDecoder`).
    """

    weight: Annotated[float, Range(0, 1000)] = 0.7
    boost: Annotated[float, Range(0, 1000)] = 0.2
    decay: Share = 0.8

    def weighed(self, logits: Tensor, masks: Tensor, rows: Sequence[RowState], memory: dict[Any, Any]) -> Tensor:
        """Return logits with the credit of this step and those before it in the block."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        credit = memory.get("credit")
        if credit is None:
            credit = torch.zeros_like(logits, dtype=dtype)
        is_new = torch.tensor([[[row.step == 0]] for row in rows], device=logits.device)
        credit = (credit * self.decay).masked_fill(is_new, 0)  # also of what was not finite
        best = logits.to(dtype).softmax(-1).max(-1, keepdim=True)
        gained = (best.values**self.boost).masked_fill(~masks[..., None], 0)
        memory["credit"] = credit = credit.scatter_add(2, best.indices, gained)
        return logits + self.weight * credit.log1p()

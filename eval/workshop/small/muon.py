"""Muon in float32, for matrices and kernels of convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Step along the nearest orthogonal matrix to the momentum, in float32.

    `torch.optim.Muon` rounds to bfloat16, which is slow on processors without hardware for it,
    and takes matrices alone; kernels of convolutions are flattened here.

    Reference: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        super().__init__(groups, {"lr": rate, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"]
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                moved = weight.grad.lerp(momentum, group["momentum"]).flatten(1)
                alike.setdefault((moved.shape[0], moved.shape[1]), []).append((weight, moved))
            for (rows, columns), pairs in alike.items():
                changes = orthogonal(torch.stack([moved for _, moved in pairs]))
                size = max(1.0, rows / columns) ** 0.5
                for (weight, _), change in zip(pairs, changes, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(change.view_as(weight) * (group["lr"] * size))


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrices [..., M, N], by five steps of Newton-Schulz."""
    high = matrices.shape[-2] > matrices.shape[-1]
    wide: Tensor = matrices.mT if high else matrices
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = wide @ wide.mT
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide.mT if high else wide

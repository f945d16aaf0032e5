"""Layouts in memory and numbers of programs, for all launches."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(out: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor whose elements lie in memory as those of `out` do, copied if need be.

    Args:
        out: Dense, in any order of axes.
        tensor: Broadcasts to its shape.
    """
    if tensor.shape == out.shape and tensor.stride() == out.stride():
        return tensor
    return torch.empty_like(out, dtype=tensor.dtype).copy_(tensor)


def programs(count: int, block: int) -> tuple[int]:
    """Return the grid of programs that take `block` elements each."""
    return (-(-count // block),)

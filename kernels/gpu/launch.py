"""Layouts in memory and numbers of programs, for all launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

COLUMNS = 1024  # most numbers of a row that a program takes


def aligned(out: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor that broadcasts to dense `out`, elements in memory as those of `out`, copied if need be."""
    if tensor.shape == out.shape and tensor.stride() == out.stride():
        return tensor
    return torch.empty_like(out, dtype=tensor.dtype).copy_(tensor)


def programs(count: int, block: int) -> tuple[int]:
    """Return the grid of programs that take `block` elements each."""
    return (-(-count // block),)


def row_tile(width: int, options: dict[str, int]) -> dict[str, int]:
    """Return the settings of a launch over parts of rows of a width, of `TILE` numbers."""
    columns = min(max(16, triton.next_power_of_2(width)), COLUMNS)
    return {"ROWS": max(options["TILE"] // columns, 1), "COLUMNS": columns, "num_warps": options["num_warps"]}

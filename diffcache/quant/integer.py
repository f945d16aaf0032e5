"""Whole numbers: packing codes of four bits, and products of codes that are exact."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.foreign import int_mm
from diffcache.kernels.linear import float_matmul

HALF = 128  # codes of 0 to 255 are kept as int8, lower by this


def pack4(codes: Tensor) -> Tensor:
    """Pack codes of four bits, `[O, K]` int8, -8 to 7, two to a byte, `[O, ceil(K / 2)]` uint8, the even low."""
    nibbles = (codes + 8).to(torch.uint8)
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack4(packed: Tensor, columns: int) -> Tensor:
    """Return the codes that `pack4` packed, `[O, columns]` int8, -8 to 7."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    return pairs.flatten(1)[:, :columns].to(torch.int8) - 8


def int_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` exactly, `[M, N]` int32, of `[M, K]` and `[N, K]` int8.

    Runs torch's own int8 product where it takes the shapes (on CUDA more than 16 rows and the other
    sizes multiples of 8); elsewhere float32 products of at most 1024 terms, in which no sum of
    codes is rounded, added up as whole numbers. Both give the same numbers bit for bit.
    """
    if serves(left, right):
        return int_mm(left, right.t())
    return float_matmul(left, right)


def serves(left: Tensor, right: Tensor) -> bool:
    """Return whether torch multiplies these codes as whole numbers."""
    (rows, terms), columns = left.shape, right.shape[0]
    if not rows * terms * columns:
        return False
    if left.device.type == "cuda":
        return rows > 16 and terms % 8 == 0 and columns % 8 == 0
    # torch 2.13 returns memory it did not write for one term, and for rows that are one in memory
    return left.device.type == "cpu" and terms > 1 and 0 not in left.stride()

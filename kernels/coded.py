"""Attend to keys and values as they are coded, without decoding them to memory."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kernels.dispatch import DTYPES, define
from diffcache.kernels.quantize import _restored

SIZES = (64, 128, 256)  # channels of a head that the kernel takes
MOST_SUMS = 16384  # sums of a program that fit its registers


def can_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bits: float,
    value_bits: float,
    each: int,
    width: int,
    sizes: tuple[int, int],
) -> bool:
    """Return whether the kernel should run on arguments of `attn_decode_kivi`, and sizes of a key and of a value."""
    fits = {key_bits, value_bits} <= {2, 4, 8} and sizes[0] in SIZES and sizes[1] in SIZES
    alike = len(q) == len(keys) == len(values) and q.dtype in DTYPES and values.shape[2] > 0
    groups, left = divmod(q.shape[1], keys.shape[1])
    if not fits or not alike or left or each % 16 or sizes[1] % width or groups > 16:
        return False
    queries = 1 << (groups - 1).bit_length()  # each has a sum for every group of channels
    few = queries * sizes[1] * (sizes[1] // width) <= MOST_SUMS
    return few and ATTEND.takes(q, keys, values)


def attn_decode_kivi(
    q: Tensor,
    keys: Tensor,
    key_grid: Tensor,
    values: Tensor,
    value_grid: Tensor,
    scale: float,
    key_bits: int,
    value_bits: int,
    each: int,
    width: int,
    key_shift: float,
    value_shift: float,
) -> tuple[Tensor, Tensor]:
    """Return attention of one query over coded slots, and its log-sum-exp.

    Grids of keys run along tokens and those of values along channels, as in KIVI, arXiv 2402.02750.
    Attention is over the first U slots, whose values are coded. The kernel multiplies queries by
    the scales of keys, once for a group, and weights by those of values, and codes by the product;
    what code 0 stands for is added once for a group. Codes are multiplied in float16 where queries
    are of 16 bits.

    Args:
        q: [B, Hq, D], float32, float16 or bfloat16; Hq is a multiple of H.
        keys: Codes, uint8 [B, H, S, bytes], S at least U.
        key_grid: [B, H, S / each, 1 or 2, D]: scale and, unless symmetric, value of code 0.
        values: Codes, uint8 [B, H, U, bytes].
        value_grid: [B, H, U, 1 or 2, W], W groups of a slot of size Dv.
        scale: Factor of the logits.
        key_bits: Bits of a code of the keys, 2, 4 or 8.
        value_bits: Bits of a code of the values, 2, 4 or 8.
        each: Consecutive slots of a group of keys.
        width: Consecutive channels of a group of values; a multiple of it is Dv.
        key_shift: Value of code 0 of symmetric grids of keys, in scales.
        value_shift: The same of values.

    Returns:
        float32 [B, Hq, Dv] and [B, Hq].
    """
    sizes = key_grid.shape[-1], width * value_grid.shape[-1]
    kernel = can_attend(q, keys, values, key_bits, value_bits, each, width, sizes)
    run = ATTEND if kernel else attend_twin
    found: tuple[Tensor, Tensor] = run(
        q, keys, key_grid, values, value_grid, scale, key_bits, value_bits, each, width, key_shift, value_shift
    )
    return found


def attend_twin(
    q: Tensor,
    keys: Tensor,
    key_grid: Tensor,
    values: Tensor,
    value_grid: Tensor,
    scale: float,
    key_bits: int,
    value_bits: int,
    each: int,
    width: int,
    key_shift: float,
    value_shift: float,
) -> tuple[Tensor, Tensor]:
    """Compute `attn_decode_kivi` in plain PyTorch."""
    heads, count = keys.shape[1], values.shape[2]
    grouped = q.float().unflatten(1, (heads, -1))
    like = q.new_empty(0, width * value_grid.shape[-1], dtype=torch.float32)
    k = _restored(keys, key_grid, grouped, key_bits, each, 1, key_shift)[:, :, :count]
    v = _restored(values, value_grid, like, value_bits, 1, width, value_shift)
    found = grouped @ k.mT * scale
    return (found.softmax(-1) @ v).flatten(1, 2), found.logsumexp(-1).flatten(1, 2)


def _like(
    q: Tensor, keys: Tensor, key_grid: Tensor, values: Tensor, value_grid: Tensor, scale: float,
    key_bits: int, value_bits: int, each: int, width: int, key_shift: float, value_shift: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_empty(*q.shape[:2], width * value_grid.shape[-1], dtype=torch.float32)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def _products(
    q: list[int],
    keys: list[int],
    key_grid: list[int],
    values: list[int],
    value_grid: list[int],
    scale: float,
    key_bits: int,
    value_bits: int,
    each: int,
    width: int,
    *_: float,
    out_shape: object = None,
) -> int:
    """Return the operations of the products of queries and keys, and of weights and values."""
    return 2 * q[0] * q[1] * values[2] * (q[2] + width * value_grid[-1])


ATTEND = define(
    "attn_decode_kivi(Tensor q, Tensor keys, Tensor key_grid, Tensor values, Tensor value_grid, "
    "float scale, int key_bits, int value_bits, int each, int width, float key_shift, "
    "float value_shift) -> (Tensor, Tensor)",
    attend_twin,
    _like,
    "coded:attn_decode_kivi",
    _products,
)

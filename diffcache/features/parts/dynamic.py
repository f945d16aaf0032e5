"""Choose which steps to compute by a dynamic programme over segments of the sampling loop."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diffcache.features.base import check_int


def best_starts(
    cost: Tensor, count: int, *, shortest: int = 1, longest: int | None = None, maximise: bool = False
) -> tuple[list[int], float]:
    """Split the steps into `count` segments of least total cost.

    A segment is a computed step and the skipped steps after it, so the starts are the steps to
    compute. Solves `best[k, j] = min over i of best[k - 1, i - 1] + cost[i, j]` in float64 and
    O(count T^2); of equal splits, the one whose last start is the smallest wins, then the one
    whose last but one is, and so on (BAC, arXiv 2506.13456, section 4.2; CacheQuant, arXiv
    2503.01323, section 4.2).

    Args:
        cost: `[T, T]`, any real dtype; `cost[i, j]` is the cost of the segment of steps `i` to
            `j`, both ends included. Only `i <= j` is read.
        count: Number of segments, 1 to T.
        shortest: Least length of a segment, in steps.
        longest: Greatest length of a segment, in steps; None for T.
        maximise: Whether `cost` is a gain to maximise.

    Returns:
        The first step of every segment, ascending from 0, and the total cost (or gain).

    Raises:
        ValueError: If `cost` is not square or holds a number that is not finite, a setting is
            below its least value, or no split has segments of the lengths asked for.

    Examples:
        >>> best_starts(anchor_costs(1 - similarity), 10)  # doctest: +SKIP
    """
    table = _checked(cost)
    total = len(table)
    check_int("count", count, 1)
    check_int("shortest", shortest, 1)
    longest = total if longest is None else longest
    check_int("longest", longest, shortest, f" (shortest is {shortest})")
    if not count * shortest <= total <= count * longest:
        least, most = -(-total // longest), total // shortest
        way = f"use a count from {least} to {most}" if least <= most else "allow other lengths"
        raise ValueError(
            f"count={count}: {total} steps do not split into {count} segments of {shortest} to {longest} steps; {way}"
        )
    lengths = np.arange(total)[None, :] - np.arange(total)[:, None] + 1  # [start, end]
    allowed = (lengths >= shortest) & (lengths <= longest)
    table = np.where(allowed, -table if maximise else table, np.inf)
    best = table[0]  # [end], of one segment
    choices = []
    for _ in range(count - 1):
        before = np.concatenate(([np.inf], best[:-1]))  # [start], of what ends before it
        totals = before[:, None] + table
        chosen = totals.argmin(axis=0)  # the first of equals
        choices.append(chosen)
        best = totals[chosen, np.arange(total)]
    starts, end = [], total - 1
    for chosen in reversed(choices):
        starts.append(int(chosen[end]))
        end = starts[-1] - 1
    value = float(best[-1])
    return [0, *reversed(starts)], -value if maximise else value


def anchor_costs(pairs: Tensor) -> Tensor:
    """Return the cost of every segment, measured against its first step, `[T, T]` float64.

    At `[i, j]` it is the `sum of pairs[i, t] for t in i..j`, distances or similarities of two
    steps, float `[T, T]`; 0 below the diagonal. They are rounded to float32, so that equal pairs
    have sums that are equal to the last bit.
    """
    return pairs.float().double().triu().cumsum(1).triu()


def adjacent_costs(pairs: Tensor) -> Tensor:
    """Return the cost of every segment, measured between its neighboring steps, `[T, T]` float64.

    At `[i, j]` it is the `sum of pairs[t - 1, t] for t in i + 1..j`, pairs as in `anchor_costs`; 0 below the diagonal.
    """
    near = pairs.float().double().diagonal(1)
    sums = torch.cat((near.new_zeros(1), near.cumsum(0)))
    return (sums[None, :] - sums[:, None]).triu()


def _checked(cost: Tensor) -> np.ndarray:
    """Return the costs as float64, zero below the diagonal."""
    if cost.ndim != 2 or cost.shape[0] != cost.shape[1] or not len(cost):
        raise ValueError(f"cost of shape {tuple(cost.shape)}: must be [T, T] for T steps")
    table = cost.detach().cpu().double().triu()
    if not torch.isfinite(table).all():
        raise ValueError("cost holds numbers that are not finite; every segment needs a cost")
    return np.asarray(table)

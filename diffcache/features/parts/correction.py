"""Least-squares affine maps per channel, from sums that are added to and merged."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 5  # count, mean of x, mean of y, centered sum of x*x, centered sum of x*y
FLAT = 2.0**-40  # a standard deviation below this part of the mean is rounding, not variance


class AffineSums:
    """Sums over pairs (x, y) that suffice to fit `y = a * x + b` in every channel.

    Moments are kept about the running mean in float64 and merged with the pairwise update of
    Chan, Golub and LeVeque (1979), so that the order of the parts does not matter beyond rounding
    and large means do not cancel. The regression is that of CacheQuant (arXiv 2503.01323,
    section 3.3, decoupled error correction).
    """

    __slots__ = ("_moments",)

    def __init__(self, state: Tensor | None = None) -> None:
        """Start empty, or from the `state` of other sums, `[5, C]` float64; raise ValueError for another shape."""
        if state is not None and (state.ndim != 2 or state.shape[0] != ROWS):
            raise ValueError(f"state of shape {tuple(state.shape)}: must be [{ROWS}, C]")
        self._moments: Tensor | None = None
        if state is not None and state.shape[1]:
            self._moments = state.to("cpu", torch.float64).clone()

    @property
    def count(self) -> int:
        """Number of pairs a channel has seen."""
        return 0 if self._moments is None else int(self._moments[0, 0])

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add pairs: values that the map is applied to, `[..., C]`, any real dtype, and those it should give.

        All but the last axis are pooled: `x.reshape(-1, 1)` fits one map for the whole tensor.
        Raises ValueError if the shapes differ, or the number of channels is not that of before.
        """
        if x.shape != y.shape or x.ndim == 0:
            raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)}: must be of one shape [..., channels]")
        x = x.detach().reshape(-1, x.shape[-1]).double()
        y = y.detach().reshape(-1, y.shape[-1]).double()
        if not x.numel():
            return
        mean_x, mean_y = x.mean(0), y.mean(0)
        x = x - mean_x
        count = torch.full_like(mean_x, x.shape[0])
        rows = (count, mean_x, mean_y, (x * x).sum(0), (x * (y - mean_y)).sum(0))
        self._join(torch.stack(rows).cpu())

    def merge(self, other: AffineSums) -> None:
        """Add the sums of `other`; raise ValueError if both have seen pairs of different numbers of channels."""
        if other._moments is not None:
            self._join(other._moments)

    def _join(self, more: Tensor) -> None:
        mine = self._moments
        if mine is None:
            self._moments = more.clone()
            return
        if mine.shape != more.shape:
            raise ValueError(
                f"{more.shape[1]} channels do not join {mine.shape[1]}; keep sums of their own for every feature"
            )
        total = mine[0] + more[0]
        apart_x, apart_y = more[1] - mine[1], more[2] - mine[2]
        share, weight = more[0] / total, mine[0] * more[0] / total
        self._moments = torch.stack(
            (
                total,
                mine[1] + share * apart_x,
                mine[2] + share * apart_y,
                mine[3] + more[3] + weight * apart_x * apart_x,
                mine[4] + more[4] + weight * apart_x * apart_y,
            )
        )

    def solve(self, official: bool = False) -> tuple[Tensor, Tensor]:
        """Return the maps of least squared error, `a` and `b`, each `[C]` float64; raise ValueError without pairs.

        `a = cov(x, y) / var(x)` and `b = mean(y) - a * mean(x)`, with both moments over the same
        number of pairs. A channel whose `x` does not vary gets `a = 1` and the difference of the
        means as `b`; a channel that saw nothing cannot exist. With `official` the covariance is
        divided by `n` and the variance by `n - 1`, as the released code of CacheQuant does, which
        makes `a` smaller by the factor `(n - 1) / n`.
        """
        if self._moments is None:
            raise ValueError("no pair was added; call add(x, y) before solve()")
        count, mean_x, mean_y, xx, xy = self._moments.unbind()
        flat = xx <= count * (FLAT * mean_x) ** 2
        a = torch.where(flat, 1.0, xy / torch.where(flat, 1.0, xx))
        if official:
            a = torch.where(flat, a, a * (count - 1) / count)
        return a, mean_y - a * mean_x

    def state(self) -> Tensor:
        """Return the sums as one tensor, `[5, C]` float64, `[5, 0]` when empty."""
        empty = torch.empty(ROWS, 0, dtype=torch.float64)
        return empty if self._moments is None else self._moments.clone()


def channel_axis(value: Tensor) -> int:
    """Return where the channels are: 1 in `[B, C, (F,) H, W]`, the last in packed `[B, T, C]`.

    In films of the layout `[B, F, C, H, W]`, which shapes do not tell apart, it is the axis of frames.
    """
    return 1 if value.ndim > 3 else value.ndim - 1


def channels_last(value: Tensor) -> Tensor:
    """Return a view with the channels last."""
    return value.movedim(channel_axis(value), -1)

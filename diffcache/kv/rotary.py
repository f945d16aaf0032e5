"""Rotary position embedding: turn keys, turn them back, and turn them by a difference."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from diffcache.kernels.rotary import rotate

Position: TypeAlias = "Tensor | Sequence[float] | float"
_ROOM = "use [S], [B, 1, S] or [B, H, S] positions of the same slots"


@dataclass(frozen=True, eq=False)
class Rotation(ABC):
    """Turn pairs of channels by angles that are linear in the position.

    Reference: RoFormer, arXiv 2104.09864, section 3.2. The scale of cos and sin is the attention
    factor of YaRN, arXiv 2309.00071, and LongRoPE.

    The work is done in float32, in float64 for float64 `x`, and angles at least in the precision
    of `inv_freq`; what is returned has the dtype of `x`. Angles in float32 are off by up to 6e-8
    times their size, exactly as the tables of models are, so that keys of a model are turned back
    by the angles that turned them. In bfloat16 every verb rounds by up to 4e-3 of a value: do not
    turn stored keys again and again, keep them unrotated instead.

    Args:
        inv_freq: `[P]` float32 or float64, radians per position of each pair of channels.
        scale: Multiplies cos and sin; dimensionless, positive.
        interleaved: Pairs are channels `(2i, 2i + 1)` instead of `(i, i + P)`.
        start: First of the `2 * P` turned channels; those outside pass through.
        varies: Frequencies change with the length of the sequence (dynamic NTK, LongRoPE): keys of
            different forwards may have been turned by different ones.
    """

    inv_freq: Tensor
    scale: float = 1.0
    interleaved: bool = False
    start: int = 0
    varies: bool = False

    def __post_init__(self) -> None:
        freq = self.inv_freq
        if freq.ndim != 1 or freq.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                "inv_freq must be [P] float32 or float64, one frequency for each pair of channels; "
                f"got {list(freq.shape)} {freq.dtype}"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be positive and finite, got {self.scale!r}")
        if self.start < 0:
            raise ValueError(f"start must be a channel, 0 or more, got {self.start!r}")

    @abstractmethod
    def angles(self, pos: Position, like: Tensor) -> Tensor:
        """Return the angles of positions.

        Args:
            pos: Positions as the verbs take them.
            like: Gives the device, and float64 if it is float64.

        Returns:
            `[..., S, P]` radians, float32 or float64.
        """

    @property
    @abstractmethod
    def unit(self) -> int:
        """Tokens that share a position on the first axis, where positions count tokens."""

    @property
    def channels(self) -> int:
        """Number of channels that are turned."""
        return 2 * self.inv_freq.shape[0]

    def rotate(self, x: Tensor, pos: Position) -> Tensor:
        """Turn by the angles of positions and multiply by the scale.

        Args:
            x: `[B, H, S, D]` floats.
            pos: Integer or float positions: one number, `[S]`, `[B, 1, S]` or `[B, H, S]`; with
                several axes one more dimension at the end.

        Raises:
            ValueError: If shapes do not fit.
        """
        return self._turn(x, pos, self.scale)

    def unrotate(self, x: Tensor, pos: Position) -> Tensor:
        """Undo `rotate` of the same positions, its scale too; raise ValueError if shapes do not fit."""
        return self._turn(x, pos, self.scale, back=True)

    def shift(self, x: Tensor, delta: Position) -> Tensor:
        """Move rotated keys from their positions to `delta` later ones; the scale stays.

        With unit cos and sin: a second scale would change the logits. Keys at `p` come out as
        `rotate` gives at `p + delta`, whatever `p` is. All must have been turned by these
        frequencies: where `varies` is set, store keys unrotated and rotate them on reading.

        Args:
            x: `[B, H, S, D]` floats, rotated.
            delta: Differences of positions, shaped as `pos` of `rotate`. Channels of an axis with
                difference 0 come out bit for bit.

        Raises:
            ValueError: If shapes do not fit.
        """
        return self._turn(x, delta, 1.0)

    def _angles(self, x: Tensor, pos: Position) -> Tensor:
        if x.ndim != 4 or not x.is_floating_point() or x.shape[3] < self.start + self.channels:
            raise ValueError(
                f"x must be [B, H, S, D] floats with D >= {self.start + self.channels}, the end of "
                f"the turned channels; got {list(x.shape)} {x.dtype}"
            )
        angles = self.angles(pos, x)
        slots, lead = angles.shape[-2:-1], angles.shape[:-2]
        rows, heads, size = x.shape[:3]
        fits = lead in ((), (1, 1), (1, heads), (rows, 1), (rows, heads))
        if not fits or (slots and slots[0] not in (1, size)):
            raise ValueError(f"positions of {[*lead, *slots]} do not fit x of {list(x.shape)}: {_ROOM}")
        return angles

    def _turn(self, x: Tensor, pos: Position, scale: float, *, back: bool = False) -> Tensor:
        angles = self._angles(x, pos)
        if self.channels == 0:
            return x
        return rotate(x, angles, scale=scale, back=back, start=self.start, interleaved=self.interleaved)


def place(pos: Position, freq: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions and frequencies on the device of `like`, in the dtype angles are made in.

    Args:
        pos: Numbers of any shape.
        freq: `[P]` float32 or float64.
        like: Gives the device, and float64 if it is float64.
    """
    dtype = torch.float64 if like.dtype is torch.float64 else freq.dtype
    return torch.as_tensor(pos, device=like.device).to(dtype), freq.to(like.device, dtype)


@dataclass(frozen=True, eq=False)
class Rotary(Rotation):
    """Turn pairs of channels by one position, over all or some channels of a head.

    No frequencies at all is a layer without positions: everything passes through.

    Reference: RoFormer, arXiv 2104.09864, equations 14 and 34. Scaled variants (linear, NTK, YaRN,
    LongRoPE, Llama 3) differ in `inv_freq` and `scale` alone.
    """

    unit = 1

    @staticmethod
    def default(theta: float, dim: int, *, interleaved: bool = False) -> Rotary:
        """Return the rotary of `dim` channels with pair `i` at `theta ** (-2i / dim)` radians.

        Args:
            theta: Base, dimensionless, above 0.
            dim: Turned channels, even.
            interleaved: Pairs are channels `(2i, 2i + 1)` instead of `(i, i + dim / 2)`.

        Raises:
            ValueError: If a number is out of its range.
        """
        return Rotary(frequencies(theta, dim, torch.float32), interleaved=interleaved)

    def angles(self, pos: Position, like: Tensor) -> Tensor:
        """Return `[..., S, P]` angles of `[..., S]` positions."""
        at, freq = place(pos, self.inv_freq, like)
        return (at if at.ndim else at[None])[..., None] * freq


def frequencies(theta: float, dim: int, dtype: torch.dtype) -> Tensor:
    """Return `[dim / 2]` radians per position, `theta ** (-2i / dim)`, equation 15 of RoFormer.

    Args:
        theta: Base, dimensionless, above 0.
        dim: Turned channels, even.
        dtype: float32 or float64.

    Raises:
        ValueError: If a number is out of its range.
    """
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"theta must be positive and finite, got {theta!r}")
    if dim < 0 or dim % 2:
        raise ValueError(f"dim must be even and 0 or more, as channels turn in pairs; got {dim!r}")
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype) / max(dim, 1))

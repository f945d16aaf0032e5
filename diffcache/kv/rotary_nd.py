"""Rotary position embedding over several axes: time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor

from diffcache.kv.rotary import Position, Rotation, frequencies, place

_FAR = 2**40  # beyond every position


@dataclass(frozen=True, eq=False)
class RotaryND(Rotation):
    """Turn each pair of channels by the position on its own axis.

    Positions have one more dimension, the axes: `[A]`, `[S, A]`, `[B, 1, S, A]` or
    `[B, H, S, A]`. To turn keys along one axis alone, `shift` them by 0 on the others.

    Reference: Qwen2-VL, arXiv 2409.12191 (M-RoPE); Wan, arXiv 2503.20314 (axes of
    video). The first settings are those of `Rotation`.

    Args:
        axes: The axis of each pair, `P` numbers from 0.
        count: Number of axes `A`.
        grid: Sizes of all axes but the first. Positions are then single numbers, as a cache keeps
            them, that count tokens of a grid row by row: of video `(height, width)`.
    """

    axes: tuple[int, ...] = ()
    count: int = 3
    grid: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.axes) != self.inv_freq.shape[0]:
            raise ValueError(
                f"axes must name the axis of each of the {self.inv_freq.shape[0]} pairs, got {len(self.axes)} of them"
            )
        if self.count < 1 or not all(0 <= axis < self.count for axis in self.axes):
            raise ValueError(f"axes must be from 0 to count - 1 = {self.count - 1}: {self.axes}")
        if self.grid is not None and (len(self.grid) != self.count - 1 or min(self.grid) < 1):
            raise ValueError(
                f"grid={self.grid}: must have the sizes of the last {self.count - 1} axes, each at least 1"
            )

    @staticmethod
    def sections(dims: Sequence[int], theta: float | Sequence[float] = 10000.0) -> RotaryND:
        """Return the rotary of video transformers: consecutive channels for each axis.

        Adjacent channels are a pair, and each axis has its own frequencies, from 1 radian down,
        in float64.

        Args:
            dims: Channels of each axis, even; of Wan with heads of 128, `(44, 42, 42)`.
            theta: Base, dimensionless, one for all axes or one for each.

        Raises:
            ValueError: If a number is out of its range.
        """
        bases = [theta] * len(dims) if isinstance(theta, (int, float)) else list(theta)
        if not dims or len(bases) != len(dims):
            raise ValueError(f"sections needs one dim and one theta for each axis, got {len(dims)} and {len(bases)}")
        parts = [frequencies(base, dim, torch.float64) for base, dim in zip(bases, dims, strict=True)]
        axes = tuple(axis for axis, part in enumerate(parts) for _ in range(part.shape[0]))
        return RotaryND(torch.cat(parts), interleaved=True, axes=axes, count=len(dims))

    @staticmethod
    def mrope(inv_freq: Tensor, section: Sequence[int], *, scale: float = 1.0, alternate: bool = False) -> RotaryND:
        """Return multimodal rotary: the pairs of one list of frequencies shared out to axes.

        Args:
            inv_freq: `[P]` float32 or float64, radians per position of each pair.
            section: Pairs of each axis, `P` together.
            scale: Multiplies cos and sin; dimensionless, positive.
            alternate: Axes take turns while they have pairs left, and axis 0 takes the rest
                (Qwen3-VL), instead of consecutive pairs for each (Qwen2-VL).

        Raises:
            ValueError: If the sections do not fill `inv_freq`.
        """
        pairs = inv_freq.shape[0]
        if sum(section) != pairs or any(part < 0 for part in section):
            raise ValueError(f"section must share out the {pairs} pairs of inv_freq, got {tuple(section)}")
        count = len(section)
        if alternate:
            axes = tuple(i % count if i // count < section[i % count] else 0 for i in range(pairs))
        else:
            axes = tuple(axis for axis, part in enumerate(section) for _ in range(part))
        return RotaryND(inv_freq, scale, axes=axes, count=count)

    @property
    def unit(self) -> int:
        """Tokens of the grid; one without a grid."""
        return prod(self.grid or ())

    def angles(self, pos: Position, like: Tensor) -> Tensor:
        """Return `[..., S, P]` angles of `[..., S, A]` positions."""
        if self.grid is not None:
            pos = self._unravelled(torch.as_tensor(pos, device=like.device))
        at, freq = place(pos, self.inv_freq, like)
        if not at.ndim or at.shape[-1] != self.count:
            raise ValueError(f"positions must end in {self.count} axes, [..., S, {self.count}]; got {list(at.shape)}")
        own = at.index_select(-1, torch.tensor(self.axes, dtype=torch.long, device=at.device))
        return (own if own.ndim > 1 else own[None]) * freq

    def _unravelled(self, pos: Tensor) -> Tensor:
        """Return `[..., A]` positions on the axes of numbers in the grid."""
        found = []
        for size in reversed(self.grid or ()):
            found.append(pos % size)
            pos = pos.div(size, rounding_mode="floor")
        return torch.stack([pos, *reversed(found)], -1)


@final
@dataclass(frozen=True, eq=False)
class RotaryTable(Rotation):
    """Turn each pair of channels by the position that a token has on the pair's axis.

    A slot notes one number, that of its token, and the table says where the token is: the tokens
    of an image share a time and differ in height and width.

    Reference: Qwen2-VL, arXiv 2409.12191 (M-RoPE). The first settings are those of `Rotation`.

    Args:
        axes: The axis of each pair, `P` numbers from 0.
        table: Positions int `[B or 1, T, A]` of the tokens of each row.
    """

    unit = 1
    axes: tuple[int, ...] = ()
    table: Tensor | None = None

    @staticmethod
    def of(rotary: RotaryND, table: Tensor) -> RotaryTable:
        """Return a rotary over several axes with the positions of tokens `[B or 1, T, A]`."""
        form = rotary.scale, rotary.interleaved, rotary.start, rotary.varies, rotary.axes
        return RotaryTable(rotary.inv_freq, *form, table)

    def angles(self, pos: Position, like: Tensor) -> Tensor:
        """Return `[..., S, P]` angles.

        Args:
            pos: Numbers of tokens, int `[S]`, `[B, 1, S]` or `[B, H, S]`; or positions
                `[B, H, S, A]`, as `closed` returns them.
            like: Gives the device, and float64 if it is float64.

        Raises:
            ValueError: If a number is not that of a token that was read.
        """
        at = torch.as_tensor(pos, device=like.device)
        found = at if at.ndim == 4 else self.positions(at)
        count = found.shape[-1]
        inner = RotaryND(self.inv_freq, self.scale, self.interleaved, axes=self.axes, count=count)
        return inner.angles(found, like)

    def positions(self, token: Tensor) -> Tensor:
        """Return the positions `[..., S, A]` of tokens.

        Args:
            token: Numbers, int `[S]`, `[B, 1, S]` or `[B, H, S]`.

        Raises:
            ValueError: If a number is not that of a token that was read.
        """
        table = self.table
        most = int(token.max()) if token.numel() else 0
        if table is None or token.is_floating_point() or most >= table.shape[1]:
            raise ValueError(
                f"positions up to {most} of {0 if table is None else table.shape[1]} tokens read: "
                "positions of several axes are known of those tokens alone, and this recipe turns "
                "keys or queries elsewhere; use one that reads keys where they are"
            )
        table = table.to(token.device)
        if token.ndim < 2:
            rows = table[:, token.view(-1)]
            return rows[0] if len(rows) == 1 else rows[:, None]
        batch = max(len(table), len(token))
        index = token.long().expand(batch, -1, -1)
        wide = table[:, None].expand(batch, index.shape[1], -1, -1)
        return wide.gather(2, index[..., None].expand(-1, -1, -1, table.shape[2]))

    def closed(self, pos: Tensor) -> Tensor:
        """Return the positions of slots with the gaps closed that dropped tokens left.

        All axes of a slot move by as much, so that what is left of an image keeps its shape. After
        a gap the earliest position of what follows comes right behind the latest of what is before;
        where these overlap, as within an image, nothing moves. The newest slots stay.

        Args:
            pos: Numbers of tokens, int `[B, 1 or H, S]`, -1 where a slot is empty.

        Returns:
            int64 `[B, 1 or H, S, A]`.
        """
        order = torch.argsort(pos, dim=-1, stable=True)
        token = pos.gather(-1, order)
        at = self.positions(token.clamp_min(0)).long()
        token = token.expand(at.shape[:3])
        empty = token < 0
        reached = at.amax(-1).masked_fill(empty, -_FAR).cummax(-1).values
        coming = at.amin(-1).flip(-1).cummin(-1).values.flip(-1)
        gap = (coming[..., 1:] - reached[..., :-1] - 1).clamp_min(0)
        dropped = (token.diff(dim=-1) > 1) & ~empty[..., :-1]
        moves = gap.where(dropped, 0).flip(-1).cumsum(-1).flip(-1)
        at = at + torch.nn.functional.pad(moves, (0, 1))[..., None]
        index = order.expand(at.shape[:3])[..., None].expand_as(at)
        return torch.empty_like(at).scatter_(2, index, at)

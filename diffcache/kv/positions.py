"""Position maps: the numbers under which frames, or tokens, are rotated when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from diffcache.kv.rotary import Rotation
from diffcache.kv.rotary_nd import RotaryTable
from diffcache.kv.settings import Count, Settings
from diffcache.kv.slots import EMPTY


class PositionMap(Settings, ABC):
    """Numbers that frames are rotated under, given those that are held; frozen settings.

    A frame is as many tokens as share a position on the first axis of the rotary: those of its
    `grid`, or one token where there is none. Tokens keep their place in the grid.

    Attributes:
        steady: The number of a frame depends on nothing but the frame.
        anchored: The newest frames keep their numbers, so that queries may be rotated by their own
            positions, as models rotate them; elsewhere `KVLayer.rotate` has to rotate them.
    """

    steady: ClassVar[bool] = False
    anchored: ClassVar[bool] = False

    @abstractmethod
    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return the numbers of frames, int64 like `frame`.

        Args:
            frame: int64 [B, 1 or H, n], frames of keys or of queries, counted from 0.
            held: int64 [B, 1 or H, S], frame of each slot that is held, -1 where it is empty.
        """


@final
@dataclass(frozen=True)
class Absolute(PositionMap):
    """Rotate every frame under its own number, however far that is from the next one held.

    Reference: Self-Forcing, arXiv 2506.08009 (its released code).
    """

    steady: ClassVar[bool] = True
    anchored: ClassVar[bool] = True

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return the frames as they are."""
        return frame


@final
@dataclass(frozen=True)
class Slot(PositionMap):
    """Number the frames that are held without gaps, up to the newest, which keeps its number.

    Reference: StreamingLLM, arXiv 2309.17453, section 3.2 (tokens); Infinity-RoPE, arXiv
    2511.20649, and MotionStream, arXiv 2511.01266 (frames, by cache slot). Departure: these count
    from the first slot and here numbers end at the newest frame; rotary embedding sees no
    difference, as only differences of positions count.
    """

    anchored: ClassVar[bool] = True

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return the newest frame's number less the frames held after each."""
        shape = [max(sizes) for sizes in zip(frame.shape[:2], held.shape[:2], strict=True)]
        frame, held = frame.expand(*shape, -1), held.expand(*shape, -1)
        order = held.sort(-1).values
        ones = torch.ones_like(order[..., :1])
        count = torch.cat([ones, (order.diff(dim=-1) != 0).long()], -1).cumsum(-1)
        at = torch.searchsorted(order, frame.contiguous(), right=True)
        upto = torch.nn.functional.pad(count, (1, 0)).gather(-1, at)
        newest = order[..., -1:]
        return newest - (count[..., -1:] - upto) + (frame - newest).clamp_min(0)


@final
@dataclass(frozen=True)
class BlockRelativistic(PositionMap):
    """Hold the newest frame at the end of the horizon a model was trained on, once it got there.

    All frames move back by as much; those that would come before the first are rotated as the
    first.

    Reference: Infinity-RoPE, arXiv 2511.20649 (Block-Relativistic RoPE). The released code numbers
    slots instead, which is `Slot`.

    Args:
        horizon: Frames that the model was trained on.
    """

    horizon: Count = 21

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return frames less what the newest is beyond the horizon."""
        beyond = (held.amax(-1, keepdim=True) + 1 - self.horizon).clamp_min(0)
        return (frame - beyond).clamp_min(0)


@final
@dataclass(frozen=True)
class Refresh(PositionMap):
    """Count frames anew from `back` whenever the count reaches `every`.

    Reference: StreamDiffusionV2, arXiv 2511.07399 (RoPE refresh). The paper moves the whole frame
    of reference, which changes no difference of positions as long as the frames held reach back no
    further than the new count; those further back are rotated as the first. In the released code
    (`official`) keys keep the numbers they were written under, so that phases jump at a refresh.

    Args:
        every: Count at which counting begins anew, in frames.
        back: Count that it begins with: the frames held before the newest.
        official: Whether a frame keeps the number of its own count.
    """

    every: int = 50
    back: int = 5
    official: bool = False

    def check(self) -> None:
        """Raise ValueError if `back` is not from 0 to `every - 1`."""
        if not 0 <= self.back < self.every:
            raise ValueError(f"back={self.back}: must be from 0 to every - 1 = {self.every - 1}")

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return each frame's count, or its distance from the newest frame's."""
        if self.official:
            return self._count(frame)
        newest = held.amax(-1, keepdim=True)
        return (frame - newest + self._count(newest)).clamp_min(0)

    def _count(self, frame: Tensor) -> Tensor:
        again = self.back + (frame - self.every) % (self.every - self.back)
        return frame.where(frame < self.every, again)


@final
@dataclass(frozen=True)
class Cyclic(PositionMap):
    """Rotate every frame under its number modulo the length a model was trained on.

    Reference: Ca2-VDM, arXiv 2411.16375 (cyclic temporal position embedding). Departure: there a
    table is added to the features, here it says which numbers are rotated under.

    Args:
        length: Frames until numbers repeat.
    """

    steady: ClassVar[bool] = True
    length: Count

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return the remainders."""
        return frame % self.length


def placed(positions: PositionMap, at: Tensor, held: Tensor, unit: int) -> Tensor:
    """Return the positions that tokens are rotated under, int64 like `at`, 0 or more.

    Args:
        positions: The map.
        at: int [B, 1 or H, n], positions of keys or queries; what is below 0 stands for none.
        held: int [B, 1 or H, S], those of all slots that are held, -1 where a slot is empty.
        unit: Tokens of a frame.
    """
    at = at.long().clamp_min(0)
    if unit == 1:
        return positions.place(at, held.long()).clamp_min(0)
    frame = at.div(unit, rounding_mode="floor")
    frames = held.long().div(unit, rounding_mode="floor")
    return positions.place(frame, frames).clamp_min(0) * unit + at % unit


def own_places(meta: Mapping[str, Tensor]) -> Tensor:
    """Return the rotary positions that slots have of their own, -1 where a slot is empty."""
    pos = meta["pos"]
    return meta["rpos"].where(pos >= 0, EMPTY) if "rpos" in meta else pos


def key_places(positions: PositionMap | None, meta: Mapping[str, Tensor], rotary: Rotation) -> Tensor:
    """Return the positions that keys of slots are rotated under, these being all that is held.

    Args:
        positions: The map, None for positions as they are.
        meta: Metadata of the slots.
        rotary: Rotation that turns them.

    Returns:
        [B, 1 or H, S], and [B, 1 or H, S, A] where gaps between positions of several axes are
        closed.

    Raises:
        ValueError: If positions are looked up by token and the map is none that closes gaps.
    """
    held = own_places(meta)
    if positions is None or positions == Absolute():
        return held.clamp_min(0)
    if not isinstance(rotary, RotaryTable):
        return placed(positions, held, held, rotary.unit)
    if positions != Slot():
        raise ValueError(
            f"positions={positions!r}: tokens have positions on several axes, given one by one; "
            "use Slot(), which closes gaps, or None"
        )
    return rotary.closed(meta["pos"])

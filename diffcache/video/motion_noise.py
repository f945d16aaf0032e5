"""Noise that a video to be restyled is given: less of it where things move fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.ranges import Positive, Settings, SomeShare


@dataclass(frozen=True)
class MotionNoise(Settings):
    """Set the noise level of each chunk by how much its pictures differ from one to the next.

    Fast motion gets less noise, which keeps its structure; slow motion gets more, which is better
    to look at. The released code tells the transformer a time of 100 thousandths less than the
    level that it noises to; here the two are one number.

    Args:
        low: Level at the fastest motion, above 0.
        high: Level where nothing moves, up to 1.
        scale: Root mean square of the difference between pictures, in -1..1, that is the fastest.
        rate: Share of the new level in the moving average, above 0 and up to 1.

    Reference: StreamDiffusionV2, arXiv 2511.07399 (motion-aware noise controller), with the numbers
    of its released code.
    """

    low: float = 0.7
    high: float = 0.8
    scale: Positive = 0.2
    rate: SomeShare = 0.9

    def check(self) -> None:
        """Raise ValueError unless levels are between noise and none."""
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"low={self.low!r}, high={self.high!r}: must be 0 < low <= high <= 1")

    def level(self, pictures: Tensor, last: Tensor | None = None, before: float | None = None) -> float:
        """Return the noise level of a chunk, from `low` to `high`.

        Args:
            pictures: Pictures of the chunk, in -1..1, `[B, C, F, H, W]`; one level for all rows.
            last: Picture before them, `[B, C, 1, H, W]`; None at the start of a film.
            before: Level of the chunk before; None at the start of a film.

        Raises:
            ValueError: If shapes do not fit, or the pictures are not finite.
        """
        shape = [*pictures.shape]
        wanted = [*shape[:2], 1, *shape[3:]]
        if len(shape) != 5 or (last is not None and [*last.shape] != wanted):
            raise ValueError(
                f"pictures={shape}, last={None if last is None else [*last.shape]}: must be "
                "[B, C, F, H, W] and one picture of the same size"
            )
        film = pictures if last is None else torch.cat([last, pictures], 2)
        steps = film.float().diff(dim=2).square().mean((0, 1, 3, 4)).sqrt()
        motion = float(steps.max()) if len(steps) else 0.0
        if not motion < float("inf"):
            raise ValueError("pictures: must be finite numbers")
        wished = self.high - (self.high - self.low) * min(motion / self.scale, 1.0)
        return wished if before is None else self.rate * wished + (1 - self.rate) * before

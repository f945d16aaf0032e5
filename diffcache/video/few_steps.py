"""The sampler of few-step causal video models: predict the clean chunk, then noise it again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from torch import Tensor

from diffcache.method import is_number
from diffcache.ranges import Positive, Range, Settings

Prediction = Literal["velocity", "clean"]


@dataclass(frozen=True)
class FewSteps(Settings):
    """Noise levels of a chunk, and the update from one to the next.

    A transformer predicts the velocity `noise - clean`, or the clean chunk; a step adds fresh noise
    of the next level to the clean chunk.

    Args:
        timesteps: Times in thousandths before the shift, falling, in 0..1000.
        shift: Factor that moves times towards noise: `t` becomes `shift t / (1 + (shift - 1) t)`.
        context: Noise level of the clean pass, in thousandths, which the chunk is not noised to.
        predicts: Target that the transformer was trained on, `velocity` or `clean`.

    Raises:
        ValueError: If times do not fall.

    Reference: Self-Forcing, arXiv 2506.08009, and its released code.
    """

    timesteps: tuple[float, ...] = (1000, 750, 500, 250)
    shift: Positive = 5.0
    context: Annotated[float, Range(0, 1000)] = 0.0
    predicts: Prediction = "velocity"

    def check(self) -> None:
        """Raise ValueError unless times fall."""
        times = self.timesteps
        falls = all(one > other for one, other in pairwise(times))
        if not times or not all(map(is_number, times)) or not falls or not (times[-1] > 0 and times[0] <= 1000):
            raise ValueError(f"timesteps={times!r}: must be numbers in 0..1000 that fall")

    @property
    def levels(self) -> tuple[float, ...]:
        """Noise levels of the steps, in 0..1."""
        times = [time / 1000 for time in self.timesteps]
        return tuple(self.shift * t / (1 + (self.shift - 1) * t) for t in times)

    def clean(self, x: Tensor, predicted: Tensor, step: int) -> Tensor:
        """Return the clean chunk that a prediction for a noisy chunk stands for at a step."""
        return self.clean_at(x, predicted, self.levels[step])

    def clean_at(self, x: Tensor, predicted: Tensor, level: float) -> Tensor:
        """Return the clean chunk that a prediction for a noisy chunk stands for at a noise level, 0..1."""
        return predicted if self.predicts == "clean" else x - level * predicted

    def noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        """Return the chunk that a step begins with, of the clean one before and noise; the first is noise alone."""
        level = self.levels[step]
        return (1 - level) * clean + level * noise

"""Compare values that were made again with those that a record publishes.

Where a record keeps a value for each sample, the two are compared one by one, and so where all or
none of its samples are right. Older records keep an interval alone (`again.WEAK` says which), and
then the published number must lie in the interval of the part that was made again, or for a stamp
within twice its width, as many numbers are looked at. A batch is one computation: a sample that is
drawn beside others rounds otherwise, which moves a picture by some tenths of a dB, so that less is
asked of those that are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.metrics.intervals import share_interval

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571)  # 97.5 % quantiles for 1 to 5 degrees of freedom
# How far values may be off on average, and what share of outcomes may differ, by whether the
# samples were drawn in the batches of the record.
WIDER = 1.0  # of the interval, on both sides together
SLACK = {True: (0.05, 0.02), False: (0.3, 0.1)}


@dataclass(frozen=True)
class Made:
    """Values of some samples of a published number, made again.

    Attributes:
        row: Name of its row.
        key: Name of the number in the row.
        published: The number with its interval, as the record has it.
        now: Values made now, a number a sample, or an outcome for each of its questions.
        kept: Values of the same samples in the record; None where it keeps none.
        alike: Whether they were made in the batches of the record.
    """

    row: str
    key: str
    published: Mapping[str, Any]
    now: Tensor
    kept: Tensor | None = None
    alike: bool = True

    def __post_init__(self) -> None:
        if self.kept is None and self.is_share and self.published["value"] in (0, 1):
            every = torch.full_like(self.now, bool(self.published["value"]))
            object.__setattr__(self, "kept", every)

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of what was made now."""
        if self.is_share:
            found = share_interval(self.now)
            return found.low, found.high
        table = (self.now if self.now.ndim == 1 else self.now.mean(1)).double()
        if len(table) == 1:
            return float(table), float(table)
        # Student's, as a bootstrap of a few samples is far too narrow.
        free = len(table) - 1
        width = STUDENT[free - 1] if free <= len(STUDENT) else 1.96 + 2.37 / free + 2.8 / free**2
        reach = width * float(table.std()) / len(table) ** 0.5
        return float(table.mean()) - reach, float(table.mean()) + reach

    @property
    def is_share(self) -> bool:
        """Return whether the values are outcomes."""
        return self.now.dtype == torch.bool

    @property
    def is_inside(self) -> bool:
        """Return whether values are the same, or the published one is in the interval made now."""
        low, high = self.interval
        value = float(self.published["value"])
        return self.holds if self.kept is not None or self.is_all else low <= value <= high

    @property
    def is_whole(self) -> bool:
        """Return whether the values made now are those that gave the published number."""
        return self.is_all and self._apart() < (1e-9 if self.is_share else 1e-3)

    @property
    def is_all(self) -> bool:
        """Return whether as many samples were made as the published number is of."""
        return self.published.get("n") == len(self.now)

    @property
    def holds(self) -> bool:
        """Return whether the record still says what its code makes."""
        slack = SLACK[self.alike][self.is_share]
        if self.kept is None and self.is_all:
            return self._apart() <= slack
        if self.kept is None:
            low, high = self.interval
            spare = WIDER * (high - low) / 2  # many numbers of a record are looked at
            return low - spare <= float(self.published["value"]) <= high + spare
        apart = self.kept.double() - self.now.double()
        return bool(apart.abs().mean() <= slack)

    def _apart(self) -> float:
        return abs(float(self.now.double().mean()) - float(self.published["value"]))

"""Compare time and bytes of steps that repeat, from one third of them to the next."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def thirds(seconds: Sequence[float], alone: Sequence[float], held: Sequence[int]) -> dict[str, Any]:
    """Return the time of a step in each third, and how the last third compares with the middle.

    Args:
        seconds: Seconds of every step.
        alone: Seconds of a yardstick that never changes, measured in the same turns.
        held: Bytes after each third.

    Returns:
        `ms`, medians by thirds; `of_alone`, the same in multiples of the yardstick; `time_ratio`
        and `bytes_ratio`, last third over middle third; `bytes`.
    """
    third = len(seconds) // 3
    parts = [slice(third), slice(third, 2 * third), slice(2 * third, None)]
    shares = [own / other for own, other in zip(seconds, alone, strict=True)]
    of_alone = [median(shares[part]) for part in parts]
    return {
        "ms": [1e3 * median(seconds[part]) for part in parts], "of_alone": of_alone,
        "time_ratio": of_alone[2] / of_alone[1], "bytes": list(held),
        "bytes_ratio": held[2] / held[1],
    }  # fmt: skip

"""A bound on how often a cached run strays, for prompts that nobody has seen yet.

Settings are tried from the dearest to the cheapest on prompts that the search never saw. A prompt counts against a
setting if its output strays there or at any dearer one, so that the count never falls on the way, whatever single
prompts do. With k of n prompts against it, a setting is certified while (k + 1) / (n + 1) is at most 1 - confidence.
Then a new prompt of the same kind strays with at most that probability, over the draw of these prompts and of the new
one: conformal risk control (Angelopoulos et al., ICLR 2024, theorem 1) with the loss "the output strays". Nothing is
assumed of how close outputs are, only that the new prompt could as well have been one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffcache.features.tuned import Guarantee, Measure


def samples_needed(confidence: float) -> int:
    """Return the least number of prompts with which anything can be certified."""
    return math.ceil(1 / (1 - confidence) - 1e-9) - 1


def most_strayed(samples: int, confidence: float) -> int:
    """Return the most of `samples` prompts that may stray; below 0 if there are too few prompts."""
    return math.floor((samples + 1) * (1 - confidence) + 1e-9) - 1


def certify(
    ladder: Sequence[Any],
    measure: Callable[[Any], Sequence[float]],
    bar: float,
    confidence: float,
    kind: Measure = "psnr",
) -> tuple[Any, Guarantee | None, list[int]]:
    """Find the cheapest setting of a ladder that is certified.

    Args:
        ladder: Settings, the dearest first.
        measure: Returns the score of every prompt with a setting, higher for the better; it is
            asked for no setting behind the first that fails.
        bar: Score that a sample has to reach.
        confidence: Least probability with which a new prompt reaches it.
        kind: Kind of the score.

    Returns:
        The setting, what is known of it, and how many prompts count against each setting that was
        measured. Setting and guarantee are None if the dearest fails.
    """
    against: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    chosen, samples, counts = None, 0, []
    for setting in ladder:
        strays = np.asarray(measure(setting)) < bar
        against = strays if against is None else against | strays
        samples = len(strays)
        counts.append(int(against.sum()))
        if counts[-1] > most_strayed(samples, confidence):
            break
        chosen = setting
    if chosen is None:
        return None, None, counts
    strayed = counts[ladder.index(chosen)]
    return chosen, Guarantee(bar, confidence, samples, strayed, len(ladder), kind), counts

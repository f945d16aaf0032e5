"""CacheGen: at which level the chunks of a text are sent, so that they arrive in time."""

from __future__ import annotations

from collections.abc import Sequence


def choose_level(
    sizes: Sequence[Sequence[int]],
    bytes_per_second: float,
    seconds: float,
    compute_seconds: float | None = None,
) -> int | None:
    """Return the level the rest of a text is sent at: the finest that arrives in time.

    To be asked again before each chunk, with the bandwidth as it was last seen.

    Reference: CacheGen, arXiv 2310.07240.

    Args:
        sizes: Bytes of every chunk that is still to be sent, for each level.
        bytes_per_second: Bandwidth.
        seconds: Time that is left.
        compute_seconds: Time to compute the rest from its text instead; None where it cannot be.

    Returns:
        The level; None for computing, where that is in time and finer than sending; where nothing
        is in time, whatever comes first.

    Raises:
        ValueError: If there are no levels, or the bandwidth is not above 0.
    """
    if not sizes or not bytes_per_second > 0:
        raise ValueError(
            f"sizes={sizes!r}, bytes_per_second={bytes_per_second}: give the chunks of at least "
            "one level and a bandwidth above 0"
        )
    if compute_seconds is not None and compute_seconds <= seconds:
        return None  # nothing is lost by computing
    needed = [sum(chunks) / bytes_per_second for chunks in sizes]
    for level, need in enumerate(needed):
        if need <= seconds:
            return level
    quickest = min(range(len(needed)), key=needed.__getitem__)
    if compute_seconds is not None and compute_seconds < needed[quickest]:
        return None
    return quickest

"""Settings of recipes and of their parts, which are checked as all others are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from diffcache.kernels.pack import CHUNKS
from diffcache.ranges import *  # noqa: F403
from diffcache.ranges import Size, one_of

Bits = Annotated[float, one_of(*CHUNKS)]


def check_room(budget: Size, always: Mapping[str, int]) -> None:
    """Raise if a number of slots leaves none to choose beside those that are always read.

    A share is looked at when it is used: how many slots it is depends on the text.

    Args:
        budget: Slots a query reads, or a share of the tokens.
        always: Numbers of slots that are always read, by the name of the setting behind each.

    Raises:
        ValueError: If it leaves none.
    """
    if isinstance(budget, int) and budget <= sum(always.values()):
        why = ", ".join(f"{name}={count}" for name, count in always.items())
        raise ValueError(
            f"budget={budget}: must be above the {sum(always.values())} slots that are always "
            f"read ({why}), or nothing is chosen; give more, or make those fewer"
        )


def check_multiple(name: str, value: int, group: int) -> None:
    """Raise ValueError unless a number of tokens is a multiple of those that are coded together."""
    if value % group:
        raise ValueError(f"{name}={value}: must be a multiple of group={group}, the tokens coded together")

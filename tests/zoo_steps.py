"""Calls of the zoo's denoisers as a sampling run makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from diffcache.attach.handle import Handle
from tests.zoo.case import Case


def inputs(
    case: Case, model: nn.Module, extra: str = "", step: int = 4, seed: int = 0
) -> dict[str, Any]:
    """Make the arguments of one step, with those of a variant of the case if one is named."""
    made = case.kwargs(model, seed, step)
    return {**made, **case.extras[extra](model, seed)} if extra else made


def steps(handle: Handle, count: int) -> Iterator[int]:
    """Walk through the steps of a run that a scheduler would announce."""
    handle.restart(count)
    for index in range(count):
        yield index
        handle.run().ticks += 1

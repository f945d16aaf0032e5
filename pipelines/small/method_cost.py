"""What methods cost on a shipped model: operations, bytes, and seconds in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from diffcache.attach.flops import counted
from diffcache.pipelines.small.method_rows import rounded
from diffcache.report import Report


def ratio_in_turn(
    plain: Callable[[int], object], cached: Callable[[int], object], rounds: int = 3
) -> dict[str, float]:
    """Time two calls in turn, so that what slows the machine down slows both.

    Args:
        plain: The uncached call, given the number of the round; 0 is an untimed one before.
        cached: The same with the method.
        rounds: Timed calls of each, at least 2.

    Returns:
        Median, quartiles and number of the rounds' ratios: seconds of `plain` over those of
        `cached`, above 1 where the method is faster.

    Raises:
        ValueError: If `rounds` is below 2.
    """
    if rounds < 2:
        raise ValueError(f"rounds={rounds}: must be at least 2")
    plain(0)
    cached(0)
    ratios = []
    for number in range(1, rounds + 1):
        marks = [time.perf_counter()]
        for call in (plain, cached):
            call(number)
            marks.append(time.perf_counter())
        own, others = (end - begin for begin, end in pairwise(marks))
        ratios.append(own / others)
    q1, median, q3 = quantiles(ratios, n=4, method="inclusive")
    return {**rounded({"median": median, "q1": q1, "q3": q3}, 3), "n": rounds}


def denoiser_flops(denoiser: nn.Module, call: Callable[[], object]) -> float:
    """Return the operations of one denoiser call (a multiply-add is two), not wrapped.

    Matrix products, convolutions and attention are counted.

    Args:
        denoiser: Not compiled.
        call: Calls it; the arguments of the first call are used.
    """
    given: list[tuple[Any, Any]] = []
    hook = denoiser.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    try:
        call()
    finally:
        hook.remove()
    with torch.no_grad():
        _, once = counted(denoiser, *given[0])
    assert once is not None  # it is not compiled
    return once


@dataclass
class Tally:
    """What the runs of a method computed, added up.

    Attributes:
        samples: Drawn.
        computed: Evaluations that ran: of blocks, or of tokens where a method counts those.
        skipped: Evaluations that did not.
        steps: Computed steps, once for every sample of their run.
        saved: Floating-point operations that were saved.
        held: Most bytes held, a sample.
    """

    samples: int = 0
    computed: int = 0
    skipped: int = 0
    steps: int = 0
    saved: float = 0.0
    held: int = 0

    def add(self, report: Report, samples: int) -> None:
        """Add a run of some samples.

        Raises:
            ValueError: If its operations were not counted.
        """
        if report.flops_saved is None:
            raise ValueError(f"{report.method!r}: operations of compiled blocks are not counted")
        self.samples += samples
        self.computed += report.computed * samples
        self.skipped += report.skipped * samples
        self.steps += report.steps_computed * samples
        self.saved += report.flops_saved
        self.held = max(self.held, report.peak_bytes // samples)
